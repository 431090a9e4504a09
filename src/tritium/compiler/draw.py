"""Keep a graph before and after the passes as words, small enough to keep: one of the repeated blocks, or its beginning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from tritium import compat
from tritium.compiler.dump import target_name, type_name
from tritium.fusions.fusion import source_line
from tritium.report import Drawing, DrawnNode

# Nodes a side; one block of a large transformer has about 150.
MOST_NODES = 300


def draw(before: fx.Graph, after: fx.Graph) -> Drawing:
    """One block of both graphs; without repeated blocks, the graphs themselves."""
    block = _block(before)
    old, new = (_without_parameters(graph) for graph in (before, after))
    if block is not None:
        old = _part(old, {node.name for node in old if _within(node, block)})
        names = {node.name for node in before.nodes}
        new = _part(new, {node.name for node in old}, added={node.name for node in new} - names)
    shown_old, shown_new = old[:MOST_NODES], new[:MOST_NODES]
    return Drawing(
        ".".join(block) if block is not None else None,
        tuple(map(_drawn, shown_old)),
        tuple(map(_drawn, shown_new)),
        len(old) - len(shown_old) + len(new) - len(shown_new),
    )


def _without_parameters(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "placeholder" or not compat.is_parameter_placeholder(node)]


def _block(graph: fx.Graph) -> tuple[str, ...] | None:
    """The first of those repeated blocks that have the most nodes each."""
    sizes: Counter[tuple[str, ...]] = Counter()
    for node in graph.nodes:
        path = _path(node)
        place = next((place for place, word in enumerate(path) if word.isdecimal()), None)
        if place is not None:
            sizes[path[: place + 1]] += 1
    # A list of one is no repetition, but it is a block all the same.
    first = {path[:-1]: path for path in reversed(sizes)}
    return max(first.values(), key=sizes.__getitem__, default=None)


def _within(node: fx.Node, block: Sequence[str]) -> bool:
    return _path(node)[: len(block)] == tuple(block)


def _path(node: fx.Node) -> tuple[str, ...]:
    # An input is said to come from the module that reads it first, and stands far above it.
    return compat.module_path(node) if node.op.startswith("call_") else ()


def _part(nodes: list[fx.Node], inside: set[str], added: frozenset[str] | set[str] = frozenset()) -> list[fx.Node]:
    """Nodes from the first to the last that is inside, with the new ones next to them."""
    places = [place for place, node in enumerate(nodes) if node.name in inside]
    if not places:
        return nodes
    start, end = places[0], places[-1]
    while end + 1 < len(nodes) and nodes[end + 1].name in added:
        end += 1
    while start > 0 and nodes[start - 1].name in added:
        start -= 1
    return nodes[start : end + 1]


def _drawn(node: fx.Node) -> DrawnNode:
    target = {"placeholder": "input", "output": "return"}.get(node.op) or target_name(node)
    inputs = tuple(source.name for source in node.all_input_nodes)
    return DrawnNode(node.name, target, type_name(node), inputs, source_line(node))
