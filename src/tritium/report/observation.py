"""Records of code generation: kernels, fallbacks, lowered operators, and pairs of kernels that were not fused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tritium.report.record import Record
from tritium.report.tiling import KernelTiling


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
        known = found.get((entry.op, entry.reason), dataclasses.replace(entry, count=0, arguments={}))
        arguments = dict(Counter(known.arguments) + Counter(entry.arguments))
        count = known.count + entry.count
        found[entry.op, entry.reason] = dataclasses.replace(known, count=count, arguments=arguments)
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
