"""The pipeline stage that compiles each distinct piece of some graphs once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tritium.compiler.blocks import kept
from tritium.compiler.blocks.cut import Cut, Piece, cut
from tritium.compiler.blocks.kept import Compiled
from tritium.compiler.blocks.segments import graph_of
from tritium.compiler.blocks.stitch import stitch
from tritium.graph import with_graph
from tritium.report import GraphRecord, PassRecord, SharedPiece

NAME = "reuse_blocks"

# Compiles the module of a piece.
Compile = Callable[[fx.GraphModule, SharedPiece], Compiled]


class _FloatsDifferError(Exception):
    """Equal blocks have different floats as inputs."""


@dataclass
class Reuse:
    """The compiled pieces of one compilation, and the records that report them."""

    compile: Compile
    # Returns everything else that determines the code of a piece; None if pieces are not kept for later graphs.
    surroundings: Callable[[fx.GraphModule], Hashable] | None
    # Whether floats that are inputs may differ between pieces that share code.
    shares_floats: bool
    record: GraphRecord
    entry: PassRecord
    done: dict[tuple[Hashable, tuple[str, ...]], Compiled] = field(default_factory=dict)
    found: int = 0

    def programs(self, gms: Sequence[fx.GraphModule]) -> list[Callable[..., Any]] | None:
        """Return a function for each graph, or None (with the reason recorded) if none is cut."""
        best = cut(gms)
        if isinstance(best, str):
            self.entry.declined = best
            return None
        sharing = Counter(map(self._name, best.all()))
        shared = {name: SharedPiece(number, count) for number, (name, count) in enumerate(sharing.items())}
        self.record.order = [shared[self._name(piece)].number for piece in best.all()]
        try:
            runs = [
                [self._compiled(gm, piece, shared[self._name(piece)]).run for piece in inner]
                for gm, inner in zip(gms, best.pieces, strict=True)
            ]
        except _FloatsDifferError as reason:
            self.entry.declined = str(reason)
            self.record.forget_pieces()
            return None
        self.entry.changed = True
        self.entry.summary = self._summary(best)
        return [
            stitch(gm.graph, [piece.segment for piece in inner], calls)
            for gm, inner, calls in zip(gms, best.pieces, runs, strict=True)
        ]

    def _name(self, piece: Piece) -> tuple[Hashable, tuple[str, ...]]:
        return (piece.key.value, () if self.shares_floats else piece.key.floats)

    def _compiled(self, gm: fx.GraphModule, piece: Piece, shared: SharedPiece) -> Compiled:
        name = self._name(piece)
        if name not in self.done:
            if any(known[0] == piece.key.value for known in self.done if not self.shares_floats):
                # Inductor kept the floats of the first piece as inputs instead of making Dynamo trace the model again.
                raise _FloatsDifferError("equal blocks have numbers as inputs, which may not differ in shared code")
            self.done[name] = self._make(with_graph(gm, graph_of(piece.segment)), piece, shared)
        return self.done[name]

    def _make(self, gm: fx.GraphModule, piece: Piece, shared: SharedPiece) -> Compiled:
        if self.surroundings is None or not piece.key.is_portable:
            return self.compile(gm, shared)
        place = piece.key.exact, self.surroundings(gm)
        known = kept.find(place)
        if known is None:
            known = self.compile(gm, shared)
            kept.keep(place, known)
            return known
        self.found += 1
        if known.observation is not None:
            self.record.observed(known.observation, known.source, shared)
        return known

    def _summary(self, best: Cut) -> str:
        total, distinct = best.total, len(self.done)
        known = f", {self.found} of them found compiled" if self.found else ""
        return f"{total} pieces, {distinct} compiled{known}"
