"""The last stage of the pipeline: capture the compiled graph, or its pieces, in regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tritium.compiler.blocks.stitch import boxed, stitch
from tritium.compiler.capture.idle import Decisions
from tritium.compiler.capture.region import Region
from tritium.compiler.capture.split import Piece, obstacle, spec_of, split, written_storages
from tritium.config import CompilationConfig
from tritium.ops.bridge import boundaries
from tritium.report import GraphRecord, PassRecord

NAME = "capture"

# Compiles the pieces between boundary ops.
OfPieces = Callable[[Sequence[Piece]], Sequence[Callable[..., Any]]]

EMULATED = "emulated on the CPU: as right as on a GPU, and slower than without"


def captured(
    gm: fx.GraphModule,
    whole: Callable[[], Callable[..., Any]],
    of_pieces: OfPieces,
    config: CompilationConfig,
    record: GraphRecord,
) -> Callable[..., Any]:
    """Return a callable that replays; `whole` compiles the graph, `of_pieces` its pieces if it is cut."""
    entry = PassRecord(NAME)
    entry.declined = _why_not(gm.graph, config, record)
    if entry.declined is not None:
        record.passes.append(entry)
        return whole()
    entry.changed = True
    cuts = len(boundaries(gm.graph.nodes))
    notes = [f"cut at {cuts} boundary op{'s' if cuts > 1 else ''}"] * bool(cuts)
    notes += [EMULATED] * (record.device_type == "cpu")
    entry.summary = "; ".join(notes) or None
    decisions = Decisions(entry) if config.graphs == "auto" else None
    if cuts:
        run = _in_pieces(gm, of_pieces, config, record, decisions)
    else:
        run = Region(whole(), spec_of(gm.graph, written_storages(gm.graph)), config, record, decisions)
    # Append after the entries that compiling added.
    record.passes.append(entry)
    return run


def _why_not(graph: fx.Graph, config: CompilationConfig, record: GraphRecord) -> str | None:
    if config.graphs == "auto" and record.device_type == "cpu":
        return "graphs='auto': a CPU launches nothing that a graph could save"
    return obstacle(graph)


def _in_pieces(
    gm: fx.GraphModule,
    of_pieces: OfPieces,
    config: CompilationConfig,
    record: GraphRecord,
    decisions: Decisions | None,
) -> Callable[..., Any]:
    pieces = split(gm)
    engines = iter(of_pieces([piece for piece in pieces if piece.spec is not None]))
    runs = [
        Region(next(engines), piece.spec, config, record, decisions) if piece.spec is not None else piece.gm.forward
        for piece in pieces
    ]
    return stitch(gm.graph, [piece.segment for piece in pieces], list(map(boxed, runs)))
