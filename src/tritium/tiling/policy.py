"""What the tiling policy may do, and what it did: switches, and a decision with its reason for every kernel."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritium.config import CompilationConfig
from tritium.tiling import tables
from tritium.tiling.reductions import Choice, Table


@dataclass(frozen=True, kw_only=True)
class TilingPolicy:
    """The parts of the policy, each of which can be switched off.

    >>> TilingPolicy(narrow_sizes=False).narrow_sizes
    False
    """

    # Prove that products of sums are multiples of their factors; without effect since torch 2.14, which does so itself.
    prove_divisibility: bool = True
    # Compute indices in 32 bits where that is proven to be the same.
    narrow_sizes: bool = True
    # Compare tilings of each kernel by their cost.
    choose_tiling: bool = True
    # Choose persistent, looped or split reductions by bytes and occupancy.
    choose_reduction: bool = True
    # Go on without the coalescing analysis where it fails.
    retry_analysis: bool = True
    # Kernel name and choice.
    pins: tuple[tuple[str, str], ...] = ()
    # Instead of what is known about the device.
    reduction_table: Table | None = None

    @property
    def is_on(self) -> bool:
        return any(dataclasses.astuple(self))

    @functools.cached_property
    def identity(self) -> str:
        """What of the policy goes into a cache key: the switches, tables, and the text of every file that decides."""
        # Measured tables decide as well.
        measured = tables.entries() if self.choose_reduction and self.reduction_table is None else {}
        deciding = {"policy": dataclasses.asdict(self), "measured": measured}
        digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode())
        for file in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()


OFF = TilingPolicy(
    prove_divisibility=False, narrow_sizes=False, choose_tiling=False, choose_reduction=False, retry_analysis=False
)


def policy_of(config: CompilationConfig) -> TilingPolicy:
    """The policy that a backend's configuration asks for."""
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


@dataclass
class KernelTiling:
    """What was decided for one kernel."""

    # Dims of the grid, outermost first, with their sizes.
    dims: dict[str, str]
    choice: str
    reason: str
    # Cost of every tiling that was compared, in picoseconds an element; empty where nothing was compared.
    costs: dict[str, float] = field(default_factory=dict)
    # What became of 64-bit index arithmetic; None where the kernel has none.
    sizes: str | None = None
    # Multiples that were proven for it, as `numerator / denominator`.
    proofs: list[str] = field(default_factory=list)
    # How its rows are reduced; None where it reduces nothing, or that is not chosen here.
    reduction: Choice | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


# What is remembered of a process that compiles all day.
MOST_DECISIONS = 4096


class Decisions:
    """What the policy decided while it was active, for one graph or for a process."""

    def __init__(self) -> None:
        self._made: deque[KernelTiling] = deque(maxlen=MOST_DECISIONS)
        # By the kernel's nodes, whose names are those of the graph that is compiled now.
        self._latest: dict[frozenset[str], KernelTiling] = {}
        self._proofs: deque[str] = deque(maxlen=MOST_DECISIONS)
        # What was proven since the last kernel was begun.
        self._recent: dict[str, None] = {}
        # Rows that were cut otherwise than Inductor would, by the rows and elements of the kernels that do it.
        self._cut: dict[tuple[int, int], Choice] = {}
        # Errors of Inductor's analysis that were survived.
        self.retries: deque[str] = deque(maxlen=MOST_DECISIONS)

    def decide(self, nodes: Iterable[str], tiling: KernelTiling) -> None:
        self._made.append(tiling)
        self._latest[frozenset(nodes)] = tiling

    def cut(self, choice: Choice) -> None:
        """Rows are cut, or left whole: the kernels that follow from it are yet to come."""
        assert choice.rows is not None
        assert choice.elements is not None
        self._cut[choice.rows * choice.parts, math.ceil(choice.elements / choice.parts)] = choice

    def cut_into(self, rows: int, elements: int) -> Choice | None:
        """The choice that a kernel with so many rows of so many elements follows from."""
        return self._cut.get((rows, elements))

    @property
    def latest(self) -> KernelTiling | None:
        """The kernel whose code is generated now."""
        return self._made[-1] if self._made else None

    def prove(self, proof: str) -> None:
        self._recent[proof] = None
        self._proofs.append(proof)

    def begin(self) -> None:
        """The code of a kernel is about to be generated."""
        self._recent.clear()

    def finish(self, nodes: Iterable[str]) -> None:
        """It was; what was proven meanwhile was proven for it."""
        kernel = self.of(nodes)
        if kernel is not None:
            kernel.proofs = list(self._recent)

    def of(self, nodes: Iterable[str]) -> KernelTiling | None:
        return self._latest.get(frozenset(nodes))

    def kernels(self) -> list[KernelTiling]:
        return list(self._made)

    def proofs(self) -> list[str]:
        """Everything that was proven a multiple, each once."""
        return list(dict.fromkeys(self._proofs))


def printed(tiling: Mapping[str, Any]) -> dict[str, str]:
    """Dims and sizes for people: a reduction of size 1 is none."""
    return {
        name.rstrip("_"): str(size) for name, size in tiling.items() if not (name.startswith("r") and str(size) == "1")
    }
