"""A graph before and after the passes as two aligned lists of nodes, with edges as arcs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tritium.report.graph_text import GraphNode
from tritium.report.records import Diagram, Site

_ROW = 22
# Longer edges have wider arcs; beyond this width all arcs share the left border.
_GUTTER = 64

# A line of the comparison: a node or None on either side.
Pair = tuple[GraphNode | None, GraphNode | None]


def compared(diagram: Diagram, sites: Iterable[Site]) -> str:
    """Return both sides as HTML; removed and added nodes are marked, and sites show their fusion."""
    marks = {site.node: site for site in sites}
    pairs = aligned(diagram.before, diagram.after)
    sides = [("before", "as Dynamo made it", 0), ("after", "as the passes left it", 1)]
    if not diagram.is_changed:
        sides = [("before and after", "as Dynamo made it", 0)]
    return "".join(
        _side(name, title, [pair[side] for pair in pairs], pairs, side, marks) for name, title, side in sides
    )


def aligned(before: Sequence[GraphNode], after: Sequence[GraphNode]) -> list[Pair]:
    """Align two lists of nodes so that equal nodes share a line.

    >>> node = lambda name: GraphNode(name, "mul", "", ())
    >>> pairs = aligned([node("a"), node("b"), node("c")], [node("a"), node("fused"), node("c")])
    >>> [(left and left.name, right and right.name) for left, right in pairs]
    [('a', 'a'), ('b', 'fused'), ('c', 'c')]
    """
    old_keys, new_keys = ([(node.name, node.target) for node in nodes] for nodes in (before, after))
    matcher = difflib.SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    pairs: list[Pair] = []
    for _, left, left_end, right, right_end in matcher.get_opcodes():
        for place in range(max(left_end - left, right_end - right)):
            old = before[left + place] if left + place < left_end else None
            new = after[right + place] if right + place < right_end else None
            pairs.append((old, new))
    return pairs


def _side(
    name: str,
    title: str,
    nodes: Sequence[GraphNode | None],
    pairs: Sequence[Pair],
    side: int,
    marks: Mapping[str, Site],
) -> str:
    place = {node.name: index for index, node in enumerate(nodes) if node is not None}
    items = []
    for node, pair in zip(nodes, pairs, strict=True):
        if node is None:
            items.append('<li class="nothing"></li>')
            continue
        other = pair[1 - side]
        same = other is not None and (other.name, other.target) == (node.name, node.target)
        items.append(_item(node, "same" if same else ("went", "came")[side], marks.get(node.name)))
    count = sum(node is not None for node in nodes)
    height = _ROW * len(nodes)
    arcs = "".join(
        _arc(place[source], place[node.name]) for node in nodes if node for source in node.inputs if source in place
    )
    return (
        f'<section class="side {name.partition(" ")[0]}"><h4>{escape(name.capitalize())} <small>{escape(title)}, {count} nodes</small></h4>'
        f'<div class="nodes"><svg class="arcs" width="{_GUTTER}" height="{height}" '
        f'viewBox="0 0 {_GUTTER} {height}" aria-hidden="true">{arcs}</svg><ol>{"".join(items)}</ol></div></section>'
    )


def _arc(start: int, end: int) -> str:
    top, bottom = start * _ROW + _ROW / 2, end * _ROW + _ROW / 2
    reach = min(_GUTTER - 4, 6 + 5 * abs(end - start) ** 0.75)
    x = _GUTTER - 2
    # A Bézier curve extends to 3/4 of the distance of its control points.
    out = x - reach * 4 / 3
    return f'<path data-from="{start}" data-to="{end}" d="M{x} {top:.0f}C{out:.1f} {top:.0f} {out:.1f} {bottom:.0f} {x} {bottom:.0f}"/>'


def _item(node: GraphNode, state: str, site: Site | None) -> str:
    target = node.target.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("_C._nn.")
    details = f"{node.name} = {node.target}({', '.join(node.inputs)}) : {node.type} {node.source_line}"
    mark = ""
    if site is not None:
        text = f"{site.fusion}: {site.outcome}, {site.reason}"
        mark = f'<span class="site {escape(site.outcome)}" title="{escape(text)}">{escape(site.fusion)}</span>'
    return (
        f'<li class="{state}" title="{escape(details)}"><b>{escape(target)}</b>'
        f'<span class="type">{escape(node.type)}</span>{mark}</li>'
    )
