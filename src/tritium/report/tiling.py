"""Records of the tiling policy: how a Triton kernel is tiled and how its rows are reduced, with the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tritium.report.record import Record

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
    """The decision for one kernel."""

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
