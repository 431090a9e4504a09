"""Store captures by set of weights.

A capture reads weights by address, so it is stored with the addresses and dropped with the weights.
Equal blocks of a model share compiled code but have different weights: one region has a set for each block. Blocks that take
turns at the same addresses share a set.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium import compat
from tritium.compiler.capture.auto import Decision
from tritium.compiler.capture.graph import DeviceGraph
from tritium.compiler.capture.inputs import StaticInputs
from tritium.compiler.capture.outputs import StaticOutputs
from tritium.report.records import Capture


@dataclass
class Captured:
    """A captured call."""

    inputs: StaticInputs
    graph: DeviceGraph
    outputs: StaticOutputs

    def replay(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self.inputs.fill(args)
        self.graph.replay()
        self.inputs.write_back(args)
        return self.outputs.hand_out(args)


@dataclass
class Entry:
    """A bucket. If it runs uncaptured, its row has the reason."""

    row: Capture
    captured: Captured | None = None
    # Under graphs="auto", until the decision is final.
    decision: Decision | None = None

    def decline(self, reason: str) -> None:
        """Leave the bucket uncaptured."""
        self.captured = None
        self.row.declined, self.row.bytes = reason, 0


@dataclass(eq=False)
class WeightSet:
    """The addresses of one set of weights, and the captures that read them."""

    # Addresses by position among all arguments; None for other arguments.
    pointers: list[int | None]
    # Ids of the tensors, and weak references that report when one is deleted.
    identities: list[int]
    watched: list[Any] = field(default_factory=list)
    # How often these weights have moved in memory.
    moves: int = 0
    entries: OrderedDict[Hashable, Entry] = field(default_factory=OrderedDict)
    evictions: Counter[Hashable] = field(default_factory=Counter)


class WeightSets:
    """Every set of weights that a region was called with; `forget` drops the captures of a set."""

    def __init__(self, forget: Callable[[WeightSet], None]) -> None:
        # Weak, because it is a method of the region, which these sets must not keep alive.
        self._forget = weakref.WeakMethod(forget)
        # Groups by id of the first weight; the other weights distinguish blocks that share it.
        self._groups: dict[int, list[WeightSet]] = {}

    def __iter__(self) -> Iterator[WeightSet]:
        found = {id(weights): weights for group in list(self._groups.values()) for weights in group}
        return iter(list(found.values()))

    def find(self, args: list[Any], places: list[int]) -> WeightSet:
        """Return the set of the passed weights, found by id of the first and by all addresses."""
        group = self._groups.setdefault(id(args[places[0]]) if places else 0, [])
        for known in group:
            if compat.capture.lie_at(args, known.pointers, places):
                return known
        identities = [id(args[index]) for index in places]
        moved = next((known for known in group if known.identities == identities), None)
        if moved is not None:
            # Its captures read the old addresses.
            self._drop(moved)
        if (shared := self._at(args, places)) is not None:
            group.append(shared)
            return shared
        pointers: list[int | None] = [None] * len(args)
        for index in places:
            pointers[index] = args[index].data_ptr()
        weights = WeightSet(pointers, identities, moves=moved.moves + 1 if moved is not None else 0)
        group.append(weights)
        self._watch(weights, [args[index] for index in places])
        return weights

    def _at(self, args: list[Any], places: list[int]) -> WeightSet | None:
        """Return the set of other tensors that are at the same addresses."""
        return next((known for known in self if places and compat.capture.lie_at(args, known.pointers, places)), None)

    def clear(self) -> None:
        for weights in self:
            self._drop(weights)
        self._groups.clear()

    def _drop(self, weights: WeightSet) -> None:
        for group in self._groups.values():
            group[:] = [known for known in group if known is not weights]
        if (forget := self._forget()) is not None:
            forget(weights)

    def _watch(self, weights: WeightSet, tensors: Sequence[Any]) -> None:
        """Drop captures when one of their weights is deleted."""
        sets, watched = weakref.ref(self), weakref.ref(weights)

        def gone(_: Any) -> None:
            owner, lost = sets(), watched()
            if owner is not None and lost is not None and any(lost is known for known in owner):
                owner._drop(lost)

        weights.watched = [weakref.ref(tensor, gone) for tensor in tensors]
