"""Cut a graph at boundary ops: what stands between them is captured piece by piece, and they run as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from tritium import compat
from tritium.compat import capture as compat_capture
from tritium.compiler.capture.spec import Spec
from tritium.fusions.expression import mutated_arguments, storages, value_of
from tritium.ops.bridge import boundaries


@dataclass(frozen=True)
class Piece:
    """A part of a graph that is captured on its own."""

    name: str
    gm: fx.GraphModule
    spec: Spec

    @property
    def example_inputs(self) -> list[Any]:
        return [value_of(node) for node in self.gm.graph.find_nodes(op="placeholder")]


def obstacle(graph: fx.Graph) -> str | None:
    """Why a graph with boundaries cannot be cut, or None."""
    if boundaries(graph.nodes) and any("_enter_autocast" in str(node.target) for node in graph.nodes):
        return "a boundary op stands in a graph that switches autocast"
    return None


def split(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Piece]]:
    """A module that calls pieces and boundary ops in order, and the pieces."""
    cuts = set(boundaries(gm.graph.nodes))
    piece_of: dict[fx.Node, int] = {}
    number, ops = 0, set()
    after_cut = False
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node in cuts or after_cut:
            number += 1
        after_cut = node in cuts
        if after_cut:
            ops.add(number)
        piece_of[node] = number
    parent = compat_capture.split_graph(gm, piece_of)
    originals = {node.name: node for node in gm.graph.nodes}
    written = written_storages(gm.graph)
    found = []
    for name, child in parent.named_children():
        place = int(name.rpartition("_")[2]) if name.startswith("submod_") else None
        if place is None or place in ops or not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.find_nodes(op="placeholder"):
            _describe(node, originals[node.name])
        found.append(Piece(name, child, spec_of(child.graph, written, piece=place)))
    return parent, found


def _describe(node: fx.Node, original: fx.Node) -> None:
    node.meta = dict(original.meta)
    if original.op == "placeholder" and hasattr(original, "_dynamo_source"):
        node._dynamo_source = original._dynamo_source
    else:
        compat.describe_new_input(node, is_static=False)


def written_storages(graph: fx.Graph) -> set[int]:
    """The memory that some node of a graph writes to."""
    return {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}


def spec_of(graph: fx.Graph, written: set[int], *, piece: int | None = None) -> Spec:
    """Names, weights and written inputs of a graph."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    return Spec(
        names=tuple(map(compat.source_name, placeholders)),
        weights=tuple(_weights(placeholders)),
        written=frozenset(place for place, node in enumerate(placeholders) if storages([node]) & written),
        piece=piece,
    )


def _weights(placeholders: list[fx.Node]) -> Iterator[int]:
    for place, node in enumerate(placeholders):
        # Folded values have no source and are marked.
        folded = node.name.startswith("folded_") and bool(node.meta.get("tensor_dict"))
        if compat.is_parameter_placeholder(node) or folded:
            yield place
