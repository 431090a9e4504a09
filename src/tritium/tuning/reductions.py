"""Measured limits of reductions on one device: which rows a kernel holds in registers, and which are cut into parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Inductor's limits: the longest row that it always holds in registers, and the longest row that it never cuts.
INDUCTOR_PERSISTENT = 1024
INDUCTOR_WHOLE = 8192


@dataclass(frozen=True)
class Limit:
    """Rows of up to `elements` elements are persistent in kernels with at most `reads` loads per position."""

    reads: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class ReductionLimits:
    """The limits of one device. An omitted field leaves the choice to the rules of the tiling policy.

    >>> limits = ReductionLimits(persistent_up_to=(Limit(3, 8192),))
    >>> limits.limit(2), limits.limit(4)
    (8192, None)
    """

    # Replaces Inductor's 1,024.
    persistent_up_to: tuple[Limit, ...] = ()
    # Rows of up to this many elements are not cut, even if there are few.
    whole_up_to: int = INDUCTOR_WHOLE
    # Longer rows are cut if there are fewer than this; None: twice the multiprocessors, as in Inductor.
    split_below_rows: int | None = None
    # Up to this many rows of at least this many elements are cut inside one kernel, instead of in two.
    cooperative_up_to_rows: int = 0
    cooperative_from: int = 0
    # Versions of the packages that generated the measured code.
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)

    def limit(self, reads: int) -> int | None:
        """Return the longest persistent row of a kernel with `reads` loads; None if it was not measured."""
        fitting = [limit for limit in self.persistent_up_to if limit.reads >= reads]
        return min(fitting, key=lambda limit: limit.reads).elements if fitting else None

    def holds(self, elements: int, reads: int) -> bool:
        """Return True if a kernel with `reads` loads holds rows of so many elements in registers.

        >>> ReductionLimits().holds(1024, 9), ReductionLimits().holds(1025, 1)
        (True, False)
        """
        return elements <= INDUCTOR_PERSISTENT or elements <= (self.limit(reads) or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a file, without fields at their defaults."""
        defaults = asdict(ReductionLimits())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


INDUCTOR_LIMITS = ReductionLimits()
