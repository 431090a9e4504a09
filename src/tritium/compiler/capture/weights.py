"""Sets of weights: a recording reads weights where they lay, so it is kept with their addresses and goes with them.

Equal blocks of a model share compiled code and differ in their weights: one region has a set for each block.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.compat import capture as compat_capture
from tritium.compiler.capture.graph import DeviceGraph
from tritium.compiler.capture.idle import Decision
from tritium.compiler.capture.inputs import StaticInputs
from tritium.compiler.capture.outputs import StaticOutputs
from tritium.report import Capture


@dataclass
class Entry:
    """A bucket. Without a graph it is one that runs uncaptured, and its row says why."""

    row: Capture
    inputs: StaticInputs | None = None
    graph: DeviceGraph | None = None
    outputs: StaticOutputs | None = None
    # Under graphs="auto", until it is settled.
    decision: Decision | None = None


@dataclass(eq=False)
class WeightSet:
    """The addresses of one set of weights, and the recordings that read there."""

    # By position among all arguments; None for what is no weight.
    pointers: list[int | None]
    # Which tensors they are, and references that tell when one of them is gone.
    identities: list[int]
    watched: list[Any] = field(default_factory=list)
    # How often these weights were found in another place.
    moves: int = 0
    entries: OrderedDict[Hashable, Entry] = field(default_factory=OrderedDict)
    evictions: Counter[Hashable] = field(default_factory=Counter)


class WeightSets:
    """Every set of weights that a region was called with; `forget` lets the recordings of one go."""

    def __init__(self, forget: Callable[[WeightSet], None]) -> None:
        # A method of the region, which these sets must not keep alive.
        self._forget = weakref.WeakMethod(forget)
        # By the first weight: blocks that share it are told apart by the others.
        self._groups: dict[int, list[WeightSet]] = {}

    def __iter__(self) -> Iterator[WeightSet]:
        return iter([weights for group in list(self._groups.values()) for weights in group])

    def find(self, args: list[Any], places: list[int]) -> WeightSet:
        """The set that is passed, by the identity of the first; by address, so that none is read where it was."""
        group = self._groups.setdefault(id(args[places[0]]) if places else 0, [])
        for known in group:
            if compat_capture.lie_at(args, known.pointers, places):
                return known
        pointers: list[int | None] = [None] * len(args)
        for index in places:
            pointers[index] = args[index].data_ptr()
        made = WeightSet(pointers, [id(args[index]) for index in places])
        for known in group:
            if known.identities == made.identities:
                # The same weights in another place: what was recorded reads where they were.
                made.moves = known.moves + 1
                group.remove(known)
                self._let_go(known)
                break
        group.append(made)
        self._watch(made, group, [args[index] for index in places])
        return made

    def clear(self) -> None:
        for weights in self:
            self._let_go(weights)
        self._groups.clear()

    def _let_go(self, weights: WeightSet) -> None:
        forget = self._forget()
        if forget is not None:
            forget(weights)

    def _watch(self, weights: WeightSet, group: list[WeightSet], tensors: Sequence[Any]) -> None:
        """Let recordings go with their weights."""
        sets, watched = weakref.ref(self), weakref.ref(weights)

        def gone(_: Any) -> None:
            owner, lost = sets(), watched()
            if owner is not None and lost is not None and any(lost is known for known in group):
                group[:] = [known for known in group if known is not lost]
                owner._let_go(lost)

        weights.watched = [weakref.ref(tensor, gone) for tensor in tensors]
