"""Store one repeated block, or the beginning, of a graph as strings, before and after the passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import fx

from tritium import compat
from tritium.report.graph_text import GraphNode
from tritium.report.records import Diagram

# Maximum nodes on each side; one block of a large transformer has about 150.
MOST_NODES = 300


def diagram(before: fx.Graph, after: fx.Graph) -> Diagram:
    """Return one block of both graphs, or without repeated blocks the beginning of both graphs."""
    block = _block(before)
    old, new = (_without_parameters(graph) for graph in (before, after))
    if block is not None:
        old = _part(old, {node.name for node in old if _path(node)[: len(block)] == block})
        names = {node.name for node in before.nodes}
        new = _part(new, {node.name for node in old}, added={node.name for node in new} - names)
    shown_old, shown_new = old[:MOST_NODES], new[:MOST_NODES]
    return Diagram(
        ".".join(block) if block is not None else None,
        tuple(map(GraphNode.of, shown_old)),
        tuple(map(GraphNode.of, shown_new)),
        len(old) - len(shown_old) + len(new) - len(shown_new),
    )


def _without_parameters(graph: fx.Graph) -> list[fx.Node]:
    is_parameter = compat.dynamo.is_parameter_placeholder
    return [node for node in graph.nodes if node.op != "placeholder" or not is_parameter(node)]


def _block(graph: fx.Graph) -> tuple[str, ...] | None:
    """Return the path of the first among the repeated blocks with the most nodes, or None."""
    sizes: Counter[tuple[str, ...]] = Counter()
    for path in map(_path, graph.nodes):
        place = next((place for place, word in enumerate(path) if word.isdecimal()), None)
        if place is not None:
            sizes[path[: place + 1]] += 1
    # Keep the first block of each list, even of lists with a single block.
    first = {path[:-1]: path for path in reversed(sizes)}
    return max(first.values(), key=sizes.__getitem__, default=None)


def _path(node: fx.Node) -> tuple[str, ...]:
    # Dynamo attributes an input to the module that reads it first, although its node is far above.
    return compat.dynamo.module_path(node) if node.op.startswith("call_") else ()


def _part(nodes: list[fx.Node], inside: set[str], added: Collection[str] = ()) -> list[fx.Node]:
    """Return the nodes from the first to the last in `inside`, with adjacent nodes in `added`."""
    places = [place for place, node in enumerate(nodes) if node.name in inside]
    if not places:
        return nodes
    start, end = places[0], places[-1]
    while end + 1 < len(nodes) and nodes[end + 1].name in added:
        end += 1
    while start > 0 and nodes[start - 1].name in added:
        start -= 1
    return nodes[start : end + 1]
