"""The switches of the tiling policy, and its decisions: one with a reason for each kernel."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import disk
from tritium.config import CompilationConfig
from tritium.report.tiling import KernelTiling, ReductionChoice
from tritium.tuning import tables
from tritium.tuning.reductions import ReductionLimits


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
        measured = tables.all_reduction_limits() if uses_tables else {}
        deciding = {
            "policy": dataclasses.asdict(self),
            "measured": {name: limits.to_dict() for name, limits in measured.items()},
        }
        return disk.digest(json.dumps(deciding, sort_keys=True), *sorted(Path(__file__).parent.glob("*.py")))


OFF = TilingPolicy(
    prove_divisibility=False, narrow_sizes=False, choose_tiling=False, choose_reduction=False, retry_analysis=False
)


def policy_of(config: CompilationConfig) -> TilingPolicy:
    """Return the policy that a backend's configuration selects."""
    switches = config.pass_config
    if not switches.enable_tiling_policy:
        return dataclasses.replace(OFF, pins=config.tiling_pins())
    return TilingPolicy(
        prove_divisibility=switches.enable_divisibility_proof,
        narrow_sizes=switches.enable_narrow_sizes,
        choose_tiling=switches.enable_nd_tiling_workaround,
        choose_reduction=switches.enable_reduction_choice,
        retry_analysis=switches.enable_tiling_retry,
        pins=config.tiling_pins(),
    )


# A bound for processes that compile all day.
MOST_DECISIONS = 4096


class Decisions:
    """The decisions of an active policy, for one graph or for a process."""

    def __init__(self) -> None:
        self._made: deque[KernelTiling] = deque(maxlen=MOST_DECISIONS)
        # Keyed by the kernel's nodes; their names are unique only within the graph being compiled.
        self._latest: dict[frozenset[str], KernelTiling] = {}
        self._proofs: deque[str] = deque(maxlen=MOST_DECISIONS)
        # Proofs since the last kernel was begun.
        self._recent: dict[str, None] = {}
        # Cuts that differ from Inductor's, keyed by the rows and elements of the resulting kernels.
        self._cut: dict[tuple[int, int], ReductionChoice] = {}
        # Errors of Inductor's analysis after which the kernel was tiled without it.
        self.retries: deque[str] = deque(maxlen=MOST_DECISIONS)

    def decide(self, nodes: Iterable[str], tiling: KernelTiling) -> None:
        self._made.append(tiling)
        self._latest[frozenset(nodes)] = tiling

    def cut(self, choice: ReductionChoice) -> None:
        """Record how rows are cut, for the kernels that code generation makes of them later."""
        assert choice.rows is not None
        assert choice.elements is not None
        self._cut[choice.rows * choice.parts, math.ceil(choice.elements / choice.parts)] = choice

    def cut_into(self, rows: int, elements: int) -> ReductionChoice | None:
        """Return the recorded cut that led to a kernel of `rows` rows of `elements` elements, or None."""
        return self._cut.get((rows, elements))

    @property
    def latest(self) -> KernelTiling | None:
        """Return the decision for the kernel whose code is being generated."""
        return self._made[-1] if self._made else None

    def prove(self, proof: str) -> None:
        self._recent[proof] = None
        self._proofs.append(proof)

    def begin(self) -> None:
        """Start the code of a kernel: later proofs belong to it."""
        self._recent.clear()

    def finish(self, nodes: Iterable[str]) -> None:
        """End the code of a kernel: add the proofs since `begin` to its decision."""
        kernel = self.of(nodes)
        if kernel is not None:
            kernel.proofs = list(self._recent)

    def of(self, nodes: Iterable[str]) -> KernelTiling | None:
        return self._latest.get(frozenset(nodes))

    def kernels(self) -> list[KernelTiling]:
        return list(self._made)

    def proofs(self) -> list[str]:
        """Return all proofs, without repetitions."""
        return list(dict.fromkeys(self._proofs))


def printed(tiling: Mapping[str, Any]) -> dict[str, str]:
    """Format dims and sizes for the report, without reductions of size 1."""
    return {
        name.rstrip("_"): str(size) for name, size in tiling.items() if not (name.startswith("r") and str(size) == "1")
    }
