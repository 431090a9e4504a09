"""Records of code generation: kernels with their tiling, fallbacks, lowered operators, and pairs that were not fused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


class Record:
    """A dataclass with its fields as data that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


Form = Literal["persistent", "looped", "split"]


@dataclass(frozen=True)
class ReductionChoice:
    """The form of a reduction, the reason, and the form that Inductor would choose."""

    form: Form
    inductor: Form
    reason: str
    # The number of parts of each row; 1 for uncut rows.
    parts: int = 1
    rows: int | None = None
    elements: int | None = None
    reads: int | None = None

    @property
    def differs(self) -> bool:
        return self.form != self.inductor

    def after(self, before: ReductionChoice) -> ReductionChoice:
        """Combine this choice with the one made at lowering, when the rows were left whole."""
        return dataclasses.replace(self, inductor=before.inductor, reason=f"{before.reason}; {self.reason}")


@dataclass
class KernelTiling(Record):
    # Dims of the grid, outermost first, with their sizes.
    dims: dict[str, str]
    choice: str
    reason: str
    # Cost of every compared tiling, in picoseconds per element; empty if none was compared.
    costs: dict[str, float] = field(default_factory=dict)
    # The result of narrowing 64-bit index arithmetic; None if the kernel has none.
    sizes: str | None = None
    # Proven multiples, as `numerator / denominator`.
    proofs: list[str] = field(default_factory=list)
    # The form of its reduction; None without a reduction or if the policy does not choose it.
    reduction: ReductionChoice | None = None

    @property
    def differs(self) -> bool:
        """True if the kernel is not as Inductor alone would generate it."""
        return bool(self.choice != "coalesced" or self.sizes or (self.reduction is not None and self.reduction.differs))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> KernelTiling:
        reduction = stored["reduction"]
        return cls(**{**stored, "reduction": ReductionChoice(**reduction) if reduction is not None else None})


class Tilings(Protocol):
    """The decisions for one graph."""

    def of(self, nodes: Iterable[str]) -> KernelTiling | None:
        """Return the decision for the kernel with these Inductor nodes."""


@dataclass(frozen=True, kw_only=True)
class Kernel(Record):
    """A kernel of compiled code."""

    name: str
    # Written by Inductor, an op's own kernel, or a library's operator that generated code calls.
    kind: Literal["generated", "owned", "library"]
    ops: list[str]
    source_lines: list[str]
    bytes_read: int
    bytes_written: int
    # Bytes of the distinct inputs and outputs of the kernel's region.
    ideal_bytes: int
    # The number of the connected region of generated kernels; None for other kinds.
    region: int | None = None
    # Operations and dtype of the contractions in it; None without contractions.
    flops: int | None = None
    dtype: str | None = None
    estimated_us: float | None = None
    measured_us: float | None = None
    why_not_fused: list[str] = field(default_factory=list)
    tiling: KernelTiling | None = None
    # The piece of the graph, and how often a call of the graph launches it.
    piece: int | None = None
    count: int = 1

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    def in_piece(self, piece: int | None, count: int, first_region: int) -> Kernel:
        """Return the kernel as part of a piece of a graph; regions are numbered from `first_region`."""
        region = self.region + first_region if self.region is not None else None
        return dataclasses.replace(self, piece=piece, count=count, region=region)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Kernel:
        tiling = stored["tiling"]
        return cls(**{**stored, "tiling": KernelTiling.from_dict(tiling) if tiling is not None else None})


@dataclass(frozen=True)
class Fallback(Record):
    """An operator that Inductor calls instead of generating code for it."""

    op: str
    count: int
    reason: str
    # Number of calls by dtypes and shapes of the arguments.
    arguments: dict[str, int] = field(default_factory=dict)
    has_lowering: bool = False
    has_decomposition: bool = False

    def times(self, factor: int) -> Fallback:
        arguments = {text: count * factor for text, count in self.arguments.items()}
        return dataclasses.replace(self, count=self.count * factor, arguments=arguments)


def merged(fallbacks: Iterable[Fallback]) -> list[Fallback]:
    """Return fallbacks with the calls of equal operators added."""
    found: dict[tuple[str, str], Fallback] = {}
    for entry in fallbacks:
        known = found.setdefault((entry.op, entry.reason), dataclasses.replace(entry, count=0, arguments={}))
        arguments = dict(Counter(known.arguments) + Counter(entry.arguments))
        found[entry.op, entry.reason] = dataclasses.replace(known, count=known.count + entry.count, arguments=arguments)
    return list(found.values())


@dataclass(frozen=True)
class LoweredOp(Record):
    """An operator that became generated code."""

    op: str
    count: int


@dataclass(frozen=True)
class Pair(Record):
    """Two generated kernels that pass or share data, and Inductor's reason for not fusing them."""

    first: str
    second: str
    count: int
    bytes_passed: int
    bytes_shared: int
    reason: str


@dataclass(frozen=True)
class Observation(Record):
    """Everything known from the generation of one graph's code."""

    kernels: list[Kernel] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    lowered: list[LoweredOp] = field(default_factory=list)
    not_fused: list[Pair] = field(default_factory=list)
    # The kernels' source code, packed by `kernel_dump`.
    sources: str = ""

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Observation:
        return cls(
            [Kernel.from_dict(entry) for entry in stored["kernels"]],
            [Fallback(**entry) for entry in stored["fallbacks"]],
            [LoweredOp(**entry) for entry in stored["lowered"]],
            [Pair(**entry) for entry in stored["not_fused"]],
            str(stored["sources"]),
        )
