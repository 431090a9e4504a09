"""The pipeline stages that cut a graph at boundary ops, and capture it or its pieces in regions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tritium import compat
from tritium.compiler.blocks.segments import Facts, Segment, graph_of, is_item, segments_of, stitch
from tritium.compiler.capture.auto import PREFIX, Decisions
from tritium.compiler.capture.bucket import Spec
from tritium.compiler.capture.region import Region
from tritium.compiler.compilation import NEEDS_GRADIENTS, Compilation
from tritium.compiler.passes import freezing
from tritium.graph import mutated_arguments, storages, with_graph
from tritium.ops.bridge import boundaries

EMULATED = "emulated on the CPU: as right as on a GPU, and slower than without"
NO_LAUNCHES = f"{PREFIX}a CPU launches nothing that a graph could save"
RANKS_DECIDE = f"{PREFIX}each rank would time its own calls, and ranks capture alike; name 'with_compile' to capture"
AUTOCAST = "a boundary op stands in a graph that switches autocast"


@dataclass(frozen=True)
class Piece:
    """A part of a graph. A part with a `spec` is captured; the others are boundary ops."""

    segment: Segment
    gm: fx.GraphModule
    spec: Spec | None


def split_at_boundaries(c: Compilation) -> None:
    """Cut a graph that is captured at its boundary ops, which run uncaptured."""
    if c.config.graphs == "off":
        return
    cuts = set(boundaries(c.gm.graph.nodes))
    if c.record.needs_gradients:
        c.capture.declined = NEEDS_GRADIENTS
    elif c.config.graphs == "auto" and c.record.device_type == "cpu":
        c.capture.declined = NO_LAUNCHES
    elif c.config.graphs == "auto" and _has_collectives(c.gm.graph):
        c.capture.declined = RANKS_DECIDE
    elif cuts and any("_enter_autocast" in str(node.target) for node in c.gm.graph.nodes):
        c.capture.declined = AUTOCAST
    elif cuts:
        c.pieces = _split(c.gm, cuts)


def _split(gm: fx.GraphModule, cuts: set[fx.Node]) -> list[Piece]:
    """Return the boundary ops of a graph and the parts before, between and after them."""
    groups: list[list[fx.Node]] = [[]]
    facts = Facts(gm)
    for node in facts.calls:
        if node in cuts:
            groups += [[node], []]
        else:
            groups[-2 if is_item(node) and node.all_input_nodes[0] in cuts else -1].append(node)
    written = _written_storages(gm.graph)
    pieces = []
    for place, segment in enumerate(segments_of(groups, facts)):
        inner = with_graph(gm, graph_of(segment))
        spec = _spec_of(inner.graph, written, piece=place) if cuts.isdisjoint(segment.nodes) else None
        pieces.append(Piece(segment, inner, spec))
    return pieces


def _written_storages(graph: fx.Graph) -> set[int]:
    return {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}


def _spec_of(graph: fx.Graph, written: set[int], *, piece: int | None = None) -> Spec:
    """Return names, weights and written inputs of a graph."""
    placeholders = list(enumerate(graph.find_nodes(op="placeholder")))
    return Spec(
        names=tuple(compat.dynamo.source_name(node) for _, node in placeholders),
        weights=tuple(place for place, node in placeholders if _is_weight(node)),
        written=frozenset(place for place, node in placeholders if storages([node]) & written),
        piece=piece,
        has_collectives=_has_collectives(graph),
    )


def _has_collectives(graph: fx.Graph) -> bool:
    return any(compat.collectives.is_collective(node.target) for node in graph.nodes)


def _is_weight(node: fx.Node) -> bool:
    # Frozen values have no source, but `tensor_dict` marks them.
    frozen = node.name.startswith(freezing.PREFIX) and bool(node.meta.get("tensor_dict"))
    return frozen or compat.dynamo.is_parameter_placeholder(node)


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
        spec = _spec_of(c.gm.graph, _written_storages(c.gm.graph))
        c.programs = [Region(next(programs), spec, c.config, c.record, decisions)]
        return
    runs = [
        Region(next(programs), piece.spec, c.config, c.record, decisions)
        if piece.spec is not None
        else piece.gm.forward
        for piece in c.pieces
    ]
    c.programs = [stitch(c.gm.graph, [piece.segment for piece in c.pieces], runs)]
