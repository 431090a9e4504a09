"""The pipeline stage that compiles each distinct piece of some graphs once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tritium import compat
from tritium.artifacts.digest import settings_digest
from tritium.compiler.blocks import kept
from tritium.compiler.blocks.cut import Cut, Piece, cut
from tritium.compiler.blocks.segments import graph_of
from tritium.compiler.blocks.stitch import stitch
from tritium.compiler.capture.key import modes
from tritium.compiler.compilation import Compilation, Unit
from tritium.compiler.lower import Lowered, lower
from tritium.graph import with_graph
from tritium.report import PassRecord, SharedPiece

NAME = "reuse_blocks"

INDUCTOR_CAPTURES = "Inductor's own graphs keep the addresses of weights, which equal blocks do not share"
FLOATS_DIFFER = "equal blocks have numbers as inputs, which may not differ in shared code"

Program = Callable[..., Any]


class _FloatsDifferError(Exception):
    """Equal blocks have different floats as inputs."""


def reuse_blocks(c: Compilation) -> None:
    """Lower each distinct block once, if enough blocks repeat; otherwise leave the units to the next stage."""
    if not c.config.reuse_blocks:
        return
    gms = [unit.gm for unit in c.units]
    with c.recorded(NAME, NAME, lambda: [("rewritten", gm.graph) for gm in gms[:1]]) as entry:
        if c.settings.get("triton.cudagraphs") or compat.inductor.uses_cuda_graphs():
            entry.declined = INDUCTOR_CAPTURES
        else:
            c.programs = Reuse(c, entry).programs(gms)
    if not c.programs:
        c.record.forget_pieces()


@dataclass
class Reuse:
    """The compiled pieces of one compilation."""

    compilation: Compilation
    entry: PassRecord
    done: dict[tuple[Hashable, tuple[str, ...]], Lowered] = field(default_factory=dict)
    found: int = 0

    def programs(self, gms: Sequence[fx.GraphModule]) -> list[Program]:
        """Return a function for each graph; an empty list, with the reason recorded, if none is cut."""
        best = cut(gms)
        if isinstance(best, str):
            self.entry.declined = best
            return []
        sharing = Counter(map(self._name, best.all()))
        shared = {name: SharedPiece(number, count) for number, (name, count) in enumerate(sharing.items())}
        self.compilation.record.order = [shared[self._name(piece)].number for piece in best.all()]
        try:
            runs = [
                [self._lowered(gm, piece, shared[self._name(piece)]).run for piece in inner]
                for gm, inner in zip(gms, best.pieces, strict=True)
            ]
        except _FloatsDifferError:
            self.entry.declined = FLOATS_DIFFER
            return []
        self.entry.changed = True
        self.entry.summary = self._summary(best)
        return [
            stitch(gm.graph, [piece.segment for piece in inner], calls)
            for gm, inner, calls in zip(gms, best.pieces, runs, strict=True)
        ]

    def _name(self, piece: Piece) -> tuple[Hashable, tuple[str, ...]]:
        """Return what pieces that share code have in common: without code generation, floats may differ."""
        return (piece.key.value, () if self.compilation.is_eager else piece.key.floats)

    def _lowered(self, gm: fx.GraphModule, piece: Piece, shared: SharedPiece) -> Lowered:
        name = self._name(piece)
        if name not in self.done:
            if any(other == name[0] for other, _ in self.done):
                # Inductor kept the floats of the first piece as inputs instead of making Dynamo trace the model again.
                raise _FloatsDifferError
            self.done[name] = self._kept_or_lowered(with_graph(gm, graph_of(piece.segment)), piece, shared)
        return self.done[name]

    def _kept_or_lowered(self, gm: fx.GraphModule, piece: Piece, shared: SharedPiece) -> Lowered:
        c = self.compilation
        unit = Unit.of_piece(gm, "lowering of a block", shared, may_run_eagerly=False)
        if c.is_eager or not piece.key.is_portable:
            return lower(c, unit)
        place = piece.key.exact, _surroundings(c, gm.graph)
        lowered = kept.find(place)
        if lowered is None:
            lowered = lower(c, unit)
            kept.keep(place, lowered)
            return lowered
        self.found += 1
        if lowered.observation is not None:
            c.record.observed(lowered.observation, lowered.source, shared)
        return lowered

    def _summary(self, best: Cut) -> str:
        again = f", {self.found} of them found compiled" if self.found else ""
        return f"{best.total} pieces, {len(self.done)} compiled{again}"


def _surroundings(c: Compilation, graph: fx.Graph) -> Hashable:
    """Return everything that decides a graph's code in addition to the graph."""
    settings = tuple(sorted((name, repr(value)) for name, value in c.settings.items()))
    return c.identity(graph), settings, settings_digest(), modes(), compat.inductor.global_state()
