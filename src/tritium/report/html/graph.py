"""A graph before and after the passes as two aligned lists of nodes, with edges as arcs."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from tritium.report.graph_text import GraphNode
from tritium.report.records import Diagram, Site

ROW = 22
# Longer edges have wider arcs; beyond this width all arcs share the left border.
GUTTER = 64


@dataclass(frozen=True)
class Line:
    """A node of one side, or an empty line; with the site that begins there, if any."""

    node: GraphNode | None
    state: str = "nothing"
    site: Site | None = None

    @property
    def target(self) -> str:
        assert self.node is not None
        return self.node.target.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("_C._nn.")


@dataclass(frozen=True)
class Side:
    """The graph before or after the passes."""

    name: str
    title: str
    lines: list[Line]

    @property
    def nodes(self) -> list[GraphNode]:
        return [line.node for line in self.lines if line.node is not None]

    @property
    def arcs(self) -> list[tuple[int, int, str]]:
        """The edges as line numbers of both ends, and as an SVG path."""
        place = {line.node.name: index for index, line in enumerate(self.lines) if line.node is not None}
        return [
            (place[source], place[node.name], _path(place[source], place[node.name]))
            for node in self.nodes
            for source in node.inputs
            if source in place
        ]


def compared(diagram: Diagram, sites: Iterable[Site]) -> list[Side]:
    """Return both sides with equal nodes on one line; removed and added nodes are marked, and sites have their fusion."""
    marks = {site.node: site for site in sites}
    before, after = Side("before", "as Dynamo made it", []), Side("after", "as the passes left it", [])
    old_keys, new_keys = ([(node.name, node.target) for node in nodes] for nodes in (diagram.before, diagram.after))
    matcher = difflib.SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    for operation, start, end, new_start, new_end in matcher.get_opcodes():
        removed, added = ("same", "same") if operation == "equal" else ("went", "came")
        for old, new in itertools.zip_longest(diagram.before[start:end], diagram.after[new_start:new_end]):
            for side, node, state in ((before, old, removed), (after, new, added)):
                side.lines.append(Line(None) if node is None else Line(node, state, marks.get(node.name)))
    return [before, after] if diagram.is_changed else [Side("before and after", before.title, before.lines)]


def _path(start: int, end: int) -> str:
    top, bottom = start * ROW + ROW / 2, end * ROW + ROW / 2
    reach = min(GUTTER - 4, 6 + 5 * abs(end - start) ** 0.75)
    x = GUTTER - 2
    # A Bézier curve extends to 3/4 of the distance of its control points.
    out = x - reach * 4 / 3
    return f"M{x} {top:.0f}C{out:.1f} {top:.0f} {out:.1f} {bottom:.0f} {x} {bottom:.0f}"
