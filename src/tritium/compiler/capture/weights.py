"""Store captures by set of weights.

A capture reads weights by address, so it is stored with the addresses and dropped with the weights.
Equal blocks of a model share compiled code but have different weights: one region has a set for each block.
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
    """A bucket. If it runs uncaptured it has no graph, and its row has the reason."""

    row: Capture
    inputs: StaticInputs | None = None
    graph: DeviceGraph | None = None
    outputs: StaticOutputs | None = None
    # Under graphs="auto", until the decision is final.
    decision: Decision | None = None


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
        return iter([weights for group in list(self._groups.values()) for weights in group])

    def find(self, args: list[Any], places: list[int]) -> WeightSet:
        """Return the set of the passed weights, found by id of the first and by all addresses."""
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
                # The same weights have moved: their captures read the old addresses.
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
        """Drop captures when one of their weights is deleted."""
        sets, watched = weakref.ref(self), weakref.ref(weights)

        def gone(_: Any) -> None:
            owner, lost = sets(), watched()
            if owner is not None and lost is not None and any(lost is known for known in group):
                group[:] = [known for known in group if known is not lost]
                owner._let_go(lost)

        weights.watched = [weakref.ref(tensor, gone) for tensor in tensors]
