"""Records of code generation: kernels, fallbacks, lowered operators, and pairs of kernels that were not fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tritium.report.tiling import KernelTiling


@dataclass(frozen=True, kw_only=True)
class Kernel:
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

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Kernel:
        tiling = stored["tiling"]
        return cls(**{**stored, "tiling": KernelTiling.from_dict(tiling) if tiling is not None else None})


@dataclass(frozen=True)
class Fallback:
    """An operator that Inductor calls instead of generating code for it."""

    op: str
    count: int
    reason: str
    # Number of calls by dtypes and shapes of the arguments.
    arguments: dict[str, int] = field(default_factory=dict)
    has_lowering: bool = False
    has_decomposition: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.op, self.reason

    def times(self, factor: int) -> Fallback:
        arguments = {text: count * factor for text, count in self.arguments.items()}
        return dataclasses.replace(self, count=self.count * factor, arguments=arguments)

    def plus(self, other: Fallback) -> Fallback:
        """Add the calls of the same operator."""
        texts = {**self.arguments, **other.arguments}
        arguments = {text: self.arguments.get(text, 0) + other.arguments.get(text, 0) for text in texts}
        return dataclasses.replace(self, count=self.count + other.count, arguments=arguments)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def merged(fallbacks: Iterable[Fallback]) -> list[Fallback]:
    """Return fallbacks with the calls of equal operators added."""
    found: dict[tuple[str, str], Fallback] = {}
    for entry in fallbacks:
        known = found.get(entry.key)
        found[entry.key] = entry if known is None else known.plus(entry)
    return list(found.values())


@dataclass(frozen=True)
class LoweredOp:
    """An operator that became generated code."""

    op: str
    count: int

    def times(self, factor: int) -> LoweredOp:
        return LoweredOp(self.op, self.count * factor)


@dataclass(frozen=True)
class Pair:
    """Two generated kernels that pass or share data, and Inductor's reason for not fusing them."""

    first: str
    second: str
    count: int
    bytes_passed: int
    bytes_shared: int
    reason: str

    def times(self, factor: int) -> Pair:
        return dataclasses.replace(self, count=self.count * factor)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Observation:
    """Everything known from the generation of one graph's code."""

    kernels: list[Kernel] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    lowered: list[LoweredOp] = field(default_factory=list)
    not_fused: list[Pair] = field(default_factory=list)
    # The kernels' source code, packed by `kernel_dump`.
    sources: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Observation:
        return cls(
            [Kernel.from_dict(entry) for entry in stored["kernels"]],
            [Fallback(**entry) for entry in stored["fallbacks"]],
            [LoweredOp(**entry) for entry in stored["lowered"]],
            [Pair(**entry) for entry in stored["not_fused"]],
            str(stored["sources"]),
        )
