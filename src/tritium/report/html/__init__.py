"""The report as one HTML file that contains its style, script and diagrams and loads nothing.

Everything here is a function of the report; nothing is measured or decided. The template escapes all text.
"""

from __future__ import annotations

import datetime
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritium import disk
from tritium.errors import MissingExtra, ReportError
from tritium.report import units
from tritium.report.html import graph, plot
from tritium.report.html.kernels import Kernels
from tritium.report.records import GraphRecord, Site
from tritium.report.units import count, number

if TYPE_CHECKING:
    from tritium.report import Report

_FOLDER = Path(__file__).parent

# One block is enough for a reader; more diagrams would only enlarge the file.
MOST_DIAGRAMS = 3

_KINDS = (
    ("generated", "Generated kernels", "written by Inductor for this model"),
    ("owned", "Tritium's kernels", "owned kernels that took over a site"),
    ("library", "Library calls", "matrix products, attention and other operators that generated code calls"),
)


def render(report: Report, title: str) -> str:
    """Render the page for a report."""
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise MissingExtra("jinja2", "report", "the report as a page") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
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
        # Files of this folder.
        trusted=markupsafe.Markup,
    )
    kernels = Kernels.of(report)
    recorded = [(record, record.diagram) for record in report.records if record.diagram is not None]
    shown = sorted(recorded, key=lambda pair: not pair[1].is_changed)[:MOST_DIAGRAMS]
    return environment.get_template("report.html.jinja").render(
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
        roofline=plot.roofline_plot(kernels),
        bandwidth=plot.bandwidth_plot(kernels),
        graph=graph,
        diagrams=[(record, diagram, graph.compared(diagram, record.sites)) for record, diagram in shown],
        style=(_FOLDER / "report.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "report.js").read_text(encoding="utf-8"),
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def write(path: Path, text: str) -> None:
    """Write a page completely or not at all."""
    try:
        disk.write(path, text)
    except OSError as error:
        raise ReportError(f"the report cannot be written to {path}: {error.strerror or error}") from error


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
    first: dict[tuple[str, ...], tuple[Site, str]] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for record in report.records:
        for site in record.sites:
            key = (site.outcome, site.fusion, site.source_line, site.reason, record.graph)
            first.setdefault(key, (site, record.graph))
            counts[key] += 1
    order = ("fused", "declined", "inductor")
    rows = [(*first[key], times) for key, times in counts.items()]
    return sorted(rows, key=lambda row: (order.index(row[0].outcome), row[0].fusion, row[0].source_line))
