"""The switches of the tiling policy."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import disk
from tritium.config import CompilationConfig
from tritium.tuning.tables import ReductionLimits, all_reduction_limits


@dataclass(frozen=True, kw_only=True)
class TilingPolicy:
    """The parts of the policy; each has a switch.

    >>> TilingPolicy(narrow_sizes=False).narrow_sizes
    False
    """

    # Prove that products of sums are multiples of their factors; no effect since torch 2.14, which has such a proof.
    prove_divisibility: bool = True
    # Compute indices in 32 bits if the result is provably equal.
    narrow_sizes: bool = True
    # Compare tilings of each kernel by their cost.
    choose_tiling: bool = True
    # Choose persistent, looped or split reductions by bytes and occupancy.
    choose_reduction: bool = True
    # Tile without the coalescing analysis if it fails.
    retry_analysis: bool = True
    # Kernel name and choice.
    pins: tuple[tuple[str, str], ...] = ()
    # Replaces the measured limits of the device.
    reduction_limits: ReductionLimits | None = None

    @property
    def is_on(self) -> bool:
        return any(dataclasses.astuple(self))

    @functools.cached_property
    def identity(self) -> str:
        """Return a digest for cache keys: the switches, the tables and the text of every file of this folder."""
        uses_tables = self.choose_reduction and self.reduction_limits is None
        measured = all_reduction_limits() if uses_tables else {}
        deciding = {
            "policy": dataclasses.asdict(self),
            "measured": {name: limits.to_dict() for name, limits in measured.items()},
        }
        return disk.digest(json.dumps(deciding, sort_keys=True), *sorted(Path(__file__).parent.glob("*.py")))


# The switch in `PassConfig` of each part.
SWITCHES = {
    "prove_divisibility": "enable_divisibility_proof",
    "narrow_sizes": "enable_narrow_sizes",
    "choose_tiling": "enable_nd_tiling_workaround",
    "choose_reduction": "enable_reduction_choice",
    "retry_analysis": "enable_tiling_retry",
}

_NONE: Any = dict.fromkeys(SWITCHES, False)
OFF = TilingPolicy(**_NONE)


def policy_of(config: CompilationConfig) -> TilingPolicy:
    """Return the policy that a backend's configuration selects."""
    is_on = config.pass_config.enable_tiling_policy
    parts: Any = {part: is_on and getattr(config.pass_config, switch) for part, switch in SWITCHES.items()}
    return TilingPolicy(**parts, pins=config.tiling_pins())
