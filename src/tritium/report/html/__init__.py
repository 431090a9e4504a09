"""The report as one HTML file that contains its style, script and diagrams and loads nothing.

Everything here is a function of the report; nothing is measured or decided. The template escapes all text.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium.errors import MissingExtra
from tritium.report import units
from tritium.report.graph_text import GraphNode
from tritium.report.html import plot, precision, skipping
from tritium.report.html.kernels import Kernels
from tritium.report.records import Diagram, GraphRecord, Site
from tritium.report.units import count, number

if TYPE_CHECKING:
    import jinja2

    from tritium.report import Report

FOLDER = Path(__file__).parent

# One block is enough for a reader; more diagrams would only enlarge the file.
MOST_DIAGRAMS = 3

# Pixels of a line of a graph, and of the widest arc beside the lines: longer edges share the left border.
ROW, GUTTER = 22, 64

_KINDS = (
    ("generated", "Generated kernels", "written by Inductor for this model"),
    ("owned", "Tritium's kernels", "owned kernels that took over a site"),
    ("library", "Library calls", "matrix products, attention and other operators that generated code calls"),
)


def template(name: str, what: str) -> jinja2.Template:
    """Return a template of this folder; `what` needs it, for the message without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("jinja2", "report", what) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=units.optional(units.bytes_text),
        percent=units.optional(units.percent),
        us=units.optional("{:,.1f}".format),
        number=units.optional(number),
        times=units.optional("{:.2f}×".format),
        operations=units.optional(partial(units.rate, unit="FLOP")),
        count=count,
    )
    return environment.get_template(name)


def render(report: Report, title: str) -> str:
    kernels = Kernels(report)
    recorded = [(record, record.diagram) for record in report.records if record.diagram is not None]
    shown = sorted(recorded, key=lambda pair: not pair[1].is_changed)[:MOST_DIAGRAMS]
    return template("report.html.jinja", "the report as a page").render(
        title=title,
        report=report,
        data=report.to_dict(),
        kernels=kernels,
        outcomes=Counter(site.outcome for record in report.records for site in record.sites),
        bars=_bars(report, kernels),
        sites=_sites(report),
        families=[(family, counts) for family, counts in report.sites.items() if counts.reasons],
        absent=[family for family, counts in report.sites.items() if not counts.reasons],
        plot=plot,
        precision=precision,
        precisions=precision.precisions(report.components),
        skipping=skipping,
        skips=skipping.skipped(report.components),
        roofline=plot.roofline_plot(kernels),
        bandwidth=plot.bandwidth_plot(kernels),
        row_height=ROW,
        gutter=GUTTER,
        diagrams=[(record, diagram, compared(diagram, record.sites)) for record, diagram in shown],
        style=(FOLDER / "report.css").read_text(encoding="utf-8"),
        script=(FOLDER / "report.js").read_text(encoding="utf-8"),
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _bars(report: Report, kernels: Kernels) -> list[dict[str, Any]]:
    """Return bars for a pipeline's components, else for measured graphs, else for kinds of kernels."""
    if report.components:
        return [component.to_dict() for component in report.components]
    by_graph = kernels.us_by(lambda row: row.graph)
    if sum(us > 0 for us in by_graph.values()) > 1:
        bars = [(record.function, by_graph.get(record.graph, 0.0), _described(record)) for record in report.records]
    else:
        by_kind = kernels.us_by(lambda row: row.kernel.kind)
        bars = [(name, by_kind.get(kind, 0.0), what) for kind, name, what in _KINDS]
    return [
        {"name": name, "milliseconds": us / 1e3, "share": us / kernels.total_us, "what": what}
        for name, us, what in sorted(bars, key=lambda bar: -bar[1])
        if us
    ]


def _described(record: GraphRecord) -> str:
    runs = f", ran {number(record.runs)} times in one call" if record.runs is not None else ""
    return f"graph {record.graph}, {count(record.nodes, 'node')}{runs}"


def _sites(report: Report) -> list[tuple[Site, str, int]]:
    """Return sites with their graph and count: equal blocks repeat a site with the same outcome at the same line."""
    counts = Counter((replace(site, node=""), record.graph) for record in report.records for site in record.sites)
    order = ("fused", "declined", "inductor")
    rows = [(site, graph, times) for (site, graph), times in counts.items()]
    return sorted(rows, key=lambda row: (order.index(row[0].outcome), row[0].fusion, row[0].source_line))


@dataclass(frozen=True)
class Line:
    """A node of one side, or an empty line; with the site that begins there, if any."""

    node: GraphNode | None
    state: str = "nothing"
    site: Site | None = None


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
