"""The pipeline stage that compiles each distinct piece of some graphs once."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tritium import compat
from tritium.artifacts.digest import settings_digest
from tritium.compiler.blocks.cut import Piece, cut
from tritium.compiler.blocks.key import Key
from tritium.compiler.blocks.segments import graph_of, stitch
from tritium.compiler.capture.bucket import modes
from tritium.compiler.compilation import Compilation, Unit
from tritium.compiler.lower import Lowered, Started, start
from tritium.graph import with_graph
from tritium.report.records import PassRecord, SharedPiece

NAME = "reuse_blocks"

INDUCTOR_CAPTURES = "Inductor's own graphs keep the addresses of weights, which equal blocks do not share"
FLOATS_DIFFER = "equal blocks have numbers as inputs, which may not differ in shared code"

# Compiled pieces that another size or batch of the same model can reuse. Beyond this number the least recently used one
# is evicted; a model has about six pieces per size.
MOST_KEPT = 256
_kept: OrderedDict[Hashable, Lowered] = OrderedDict()

Program = Callable[..., Any]
# Waits for the kernels of a piece.
Finish = Callable[[], Lowered]
# What pieces that share code have in common.
Name = tuple[Hashable, tuple[str, ...]]


def reuse_blocks(c: Compilation) -> None:
    """Lower each distinct block once, if enough blocks repeat; otherwise leave the units to the next stage."""
    if not c.config.reuse_blocks:
        return
    gms = [unit.gm for unit in c.units]
    with c.recorded(NAME, NAME, lambda: [("rewritten", gm.graph) for gm in gms[:1]]) as entry:
        if c.settings.get("triton.cudagraphs") or compat.inductor.setting("triton.cudagraphs"):
            entry.declined = INDUCTOR_CAPTURES
        else:
            c.programs = Reuse(c, entry).programs(gms)
    if not c.programs:
        c.record.forget_pieces()


def forget_pieces() -> None:
    """Drop all kept code, like `torch._dynamo.reset()`."""
    _kept.clear()


@dataclass
class Reuse:
    """The compiled pieces of one compilation."""

    compilation: Compilation
    entry: PassRecord
    started: dict[Name, Finish] = field(default_factory=dict)
    # The number of pieces found compiled.
    found: int = 0
    # Why pieces waited for their kernels before the next piece started.
    waits: dict[str, None] = field(default_factory=dict)

    def programs(self, gms: Sequence[fx.GraphModule]) -> list[Program]:
        """Return a function for each graph; an empty list, with the reason recorded, if none is cut."""
        best = cut(gms)
        if isinstance(best, str):
            self.entry.declined = best
            return []
        sharing = Counter(map(self._name, best.all()))
        shared = {name: SharedPiece(number, count) for number, (name, count) in enumerate(sharing.items())}
        self.compilation.record.order = [shared[self._name(piece)].number for piece in best.all()]
        for gm, inner in zip(gms, best.pieces, strict=True):
            for piece in inner:
                name = self._name(piece)
                if name in self.started:
                    continue
                if any(other == name[0] for other, _ in self.started):
                    # Inductor kept the floats of the first piece as inputs instead of making Dynamo trace again.
                    self.entry.declined = FLOATS_DIFFER
                    return []
                self.started[name] = self._start(with_graph(gm, graph_of(piece.segment)), piece.key, shared[name])
        # Worker processes compiled kernels of all pieces meanwhile.
        done = {name: finish() for name, finish in self.started.items()}
        self.entry.changed, self.entry.summary = True, self._summary(best.total)
        return [
            stitch(gm.graph, [piece.segment for piece in inner], [done[self._name(piece)].run for piece in inner])
            for gm, inner in zip(gms, best.pieces, strict=True)
        ]

    def _summary(self, total: int) -> str:
        again = f", {self.found} of them found compiled" if self.found else ""
        waits = f"; one after another: {', '.join(self.waits)}" if self.waits else ""
        return f"{total} pieces, {len(self.started)} compiled{again}{waits}"

    def _name(self, piece: Piece) -> Name:
        """Return the key, and unless no code is generated, the floats."""
        return (piece.key.value, () if self.compilation.is_eager else piece.key.floats)

    def _start(self, gm: fx.GraphModule, key: Key, shared: SharedPiece) -> Finish:
        """Start lowering a piece, or find its code from an earlier compilation; return how to get the result."""
        c = self.compilation
        place = (key.value, _surroundings(c, gm.graph)) if key.is_portable and not c.is_eager else None
        if place in _kept:
            self.found += 1
            _kept.move_to_end(place)
            return functools.partial(_found, c, _kept[place], shared)
        started = start(c, Unit.of_piece(gm, "lowering of a block", shared, may_run_eagerly=False))
        if started.waits is not None and not c.is_eager:
            self.waits[started.waits] = None
        return started.result if place is None else functools.partial(_keep, place, started)


def _found(c: Compilation, lowered: Lowered, shared: SharedPiece) -> Lowered:
    """Add the observation of a piece that an earlier compilation lowered."""
    if lowered.observation is not None:
        c.record.observed(lowered.observation, lowered.source, shared)
    return lowered


def _keep(place: Hashable, started: Started) -> Lowered:
    """Return the result of a piece, and keep it for later compilations."""
    lowered = _kept[place] = started.result()
    while len(_kept) > MOST_KEPT:
        _kept.popitem(last=False)
    return lowered


def _surroundings(c: Compilation, graph: fx.Graph) -> Hashable:
    """Return everything that decides a graph's code in addition to the graph."""
    settings = tuple(sorted((name, repr(value)) for name, value in c.settings.items()))
    return c.identity(graph), settings, settings_digest(), modes(), compat.inductor.global_state()
