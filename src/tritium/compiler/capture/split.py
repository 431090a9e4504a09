"""Cut a graph at boundary ops, which run uncaptured; the parts between them are captured separately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tritium import compat
from tritium.compiler.blocks.facts import Facts
from tritium.compiler.blocks.segments import Segment, graph_of, is_item, segments_of
from tritium.compiler.capture.spec import Spec
from tritium.compiler.passes import freezing
from tritium.graph import mutated_arguments, storages, value_of, with_graph
from tritium.ops.bridge import boundaries


@dataclass(frozen=True)
class Piece:
    """A part of a graph. A part with a `spec` is captured; the others are boundary ops."""

    segment: Segment
    gm: fx.GraphModule
    spec: Spec | None

    @property
    def example_inputs(self) -> list[Any]:
        return [value_of(node) for node in self.gm.graph.find_nodes(op="placeholder")]


def decline_split(graph: fx.Graph) -> str | None:
    """Return why a graph is not cut at its boundary ops, or None."""
    if boundaries(graph.nodes) and any("_enter_autocast" in str(node.target) for node in graph.nodes):
        return "a boundary op stands in a graph that switches autocast"
    return None


def split(gm: fx.GraphModule) -> list[Piece]:
    """Return the boundary ops of a graph and the parts before, between and after them."""
    cuts = set(boundaries(gm.graph.nodes))
    groups: list[list[fx.Node]] = [[]]
    facts = Facts(gm)
    for node in facts.calls:
        made_by_cut = is_item(node) and node.all_input_nodes[0] in cuts
        if node in cuts:
            groups += [[node], []]
        else:
            groups[-2 if made_by_cut and not groups[-1] else -1].append(node)
    written = written_storages(gm.graph)
    pieces = []
    for place, segment in enumerate(segments_of(groups, facts)):
        inner = with_graph(gm, graph_of(segment))
        is_cut = not cuts.isdisjoint(segment.nodes)
        pieces.append(Piece(segment, inner, None if is_cut else spec_of(inner.graph, written, piece=place)))
    return pieces


def written_storages(graph: fx.Graph) -> set[int]:
    """Return the storages that a graph writes to."""
    return {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}


def spec_of(graph: fx.Graph, written: set[int], *, piece: int | None = None) -> Spec:
    """Return names, weights and written inputs of a graph."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    return Spec(
        names=tuple(map(compat.dynamo.source_name, placeholders)),
        weights=tuple(_weights(placeholders)),
        written=frozenset(place for place, node in enumerate(placeholders) if storages([node]) & written),
        piece=piece,
    )


def _weights(placeholders: list[fx.Node]) -> Iterator[int]:
    for place, node in enumerate(placeholders):
        # Frozen values have no source, but `tensor_dict` marks them.
        frozen = node.name.startswith(freezing.PREFIX) and bool(node.meta.get("tensor_dict"))
        if compat.dynamo.is_parameter_placeholder(node) or frozen:
            yield place
