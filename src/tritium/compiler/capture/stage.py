"""The pipeline stages that cut a graph at boundary ops, and capture it or its pieces in regions."""

from __future__ import annotations

from tritium.compiler.blocks.stitch import stitch
from tritium.compiler.capture.idle import Decisions
from tritium.compiler.capture.region import Region
from tritium.compiler.capture.split import decline_split, spec_of, split, written_storages
from tritium.compiler.compilation import NEEDS_GRADIENTS, Compilation
from tritium.ops.bridge import boundaries

EMULATED = "emulated on the CPU: as right as on a GPU, and slower than without"
NO_LAUNCHES = "graphs='auto': a CPU launches nothing that a graph could save"


def split_at_boundaries(c: Compilation) -> None:
    """Cut a graph that is captured at its boundary ops, which run uncaptured."""
    if c.config.graphs == "off":
        return
    c.capture.declined = _decline(c)
    if c.capture.declined is None and boundaries(c.gm.graph.nodes):
        c.pieces = split(c.gm)


def _decline(c: Compilation) -> str | None:
    """Return why no call of a graph is captured, or None."""
    if c.record.needs_gradients:
        return NEEDS_GRADIENTS
    if c.config.graphs == "auto" and c.record.device_type == "cpu":
        return NO_LAUNCHES
    return decline_split(c.gm.graph)


def capture(c: Compilation) -> None:
    """Replay calls of the compiled graph, or of each of its pieces, as static device graphs."""
    if c.config.graphs == "off":
        return
    entry = c.capture
    c.record.passes.append(entry)
    if entry.declined is not None:
        return
    entry.changed = True
    cuts = len(boundaries(c.gm.graph.nodes))
    notes = [f"cut at {cuts} boundary op{'s' if cuts > 1 else ''}"] * bool(cuts)
    notes += [EMULATED] * (c.record.device_type == "cpu")
    entry.summary = "; ".join(notes) or None
    decisions = Decisions(entry) if c.config.graphs == "auto" else None
    programs = iter(c.programs)
    if not c.pieces:
        spec = spec_of(c.gm.graph, written_storages(c.gm.graph))
        c.programs = [Region(next(programs), spec, c.config, c.record, decisions)]
        return
    runs = [
        Region(next(programs), piece.spec, c.config, c.record, decisions)
        if piece.spec is not None
        else piece.gm.forward
        for piece in c.pieces
    ]
    c.programs = [stitch(c.gm.graph, [piece.segment for piece in c.pieces], runs)]
