"""The report as one HTML file that contains its style, script and diagrams and loads nothing.

Everything here is a function of the data of `Report.to_dict()` and the diagrams; nothing is measured or decided. All
text is escaped by the template or by `html.escape`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tritium.errors import MissingExtra, ReportError
from tritium.report.html import words
from tritium.report.html.graph import compared
from tritium.report.html.kernels import Kernels
from tritium.report.html.plot import bandwidth_plot, roofline_plot

_FOLDER = Path(__file__).parent

# One block is enough for a reader; more diagrams would only enlarge the file.
MOST_DRAWINGS = 3


_KINDS = (
    ("generated", "Generated kernels", "written by Inductor for this model"),
    ("owned", "Tritium's kernels", "owned kernels that took over a site"),
    ("library", "Library calls", "matrix products, attention and other operators that generated code calls"),
)


def render(data: Mapping[str, Any], title: str) -> str:
    """Render the page for a report's data."""
    try:
        import jinja2
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
        bytes=words.bytes_text,
        percent=words.percent,
        us=words.microseconds,
        number=words.number,
        times=words.times,
        operations=words.operations,
        count=words.count,
    )
    kernels = Kernels.of(data)
    drawn = [(drawing, compared(drawing, data["site_list"])) for drawing in _drawings(data["drawings"])]
    return environment.get_template("report.html.jinja").render(
        title=title,
        data=data,
        kernels=kernels,
        summary=words.summary(data, kernels),
        bars=_bars(data, kernels),
        sites=_sites(data["site_list"]),
        families=[(family, counts) for family, counts in data["sites"].items() if sum(_outcomes(counts))],
        absent=[family for family, counts in data["sites"].items() if not sum(_outcomes(counts))],
        passes=_passes(data["passes"]),
        roofline=_made_here(roofline_plot(kernels)),
        bandwidth=_made_here(bandwidth_plot(kernels)),
        drawings=[(drawing, _made_here(drawing_html)) for drawing, drawing_html in drawn],
        not_drawn=len(data["graphs"]) - len(drawn),
        style=_made_here((_FOLDER / "report.css").read_text(encoding="utf-8")),
        script=_made_here((_FOLDER / "report.js").read_text(encoding="utf-8")),
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _made_here(text: str) -> Any:
    """Mark text as not to be escaped: a file of this folder, or a diagram with escaped content."""
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file completely or not at all."""
    target = Path(path)
    temporary = _temporary_beside(target)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(target, error) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now the error that `write` would raise after minutes of work."""
    _temporary_beside(Path(path)).unlink()


def _temporary_beside(target: Path) -> Path:
    if target.is_dir():
        raise ReportError(f"the report cannot be written to {target}: it is a folder")
    try:
        handle, name = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise _unwritable(target, error) from error
    os.close(handle)
    # mkstemp creates files readable only by the owner; give the report the usual permissions.
    mask = os.umask(0)
    os.umask(mask)
    Path(name).chmod(0o666 & ~mask)
    return Path(name)


def _unwritable(target: Path, error: OSError) -> ReportError:
    return ReportError(f"the report cannot be written to {target}: {error.strerror or error}")


def _outcomes(counts: Mapping[str, Any]) -> tuple[int, int, int]:
    return counts["fused"], counts["inductor"], counts["declined"]


def _bars(data: Mapping[str, Any], kernels: Kernels) -> list[dict[str, Any]]:
    """Return bars for a pipeline's components, else for measured graphs, else for kinds of kernels."""
    if data["components"]:
        return [dict(component) for component in data["components"]]
    if not kernels.total_us:
        return []
    bars = []
    by_graph = kernels.us_by("graph")
    if sum(us > 0 for us in by_graph.values()) > 1:
        for graph in data["graphs"]:
            what = f"graph {graph['graph']}, {words.count(graph['nodes'], 'node')}"
            if graph["runs"] is not None:
                what += f", ran {words.number(graph['runs'])} times in one call"
            bars.append((graph["function"], by_graph.get(graph["graph"], 0.0), what))
    else:
        by_kind = kernels.us_by("kind")
        bars = [(name, by_kind.get(kind, 0.0), what) for kind, name, what in _KINDS]
    bars.sort(key=lambda bar: -bar[1])
    return [
        {"name": name, "milliseconds": us / 1e3, "share": us / kernels.total_us, "what": what}
        for name, us, what in bars
        if us
    ]


def _sites(sites: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join sites with the same outcome at the same line into one row, because equal blocks repeat them."""
    counted: Counter[tuple[Any, ...]] = Counter(
        (site["outcome"], site["fusion"], site["source_line"], site["reason"], site["graph"]) for site in sites
    )
    names = ("outcome", "fusion", "source_line", "reason", "graph")
    order = ("fused", "declined", "inductor")
    rows = [{**dict(zip(names, key, strict=True)), "count": count} for key, count in counted.items()]
    return sorted(rows, key=lambda row: (order.index(row["outcome"]), row["fusion"], row["source_line"]))


def _passes(passes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for entry in passes:
        notes = [f"{request['settings']} because {request['because']}" for request in entry["requests"]]
        notes += [entry["summary"]] if entry["summary"] else []
        notes += [f"{count}x left alone: {reason}" for reason, count in entry["left_alone"].items()]
        notes += [f"declined: {entry['declined']}"] if entry["declined"] else []
        notes += [f"failed: {entry['failed']}"] if entry["failed"] else []
        rows.append({**entry, "notes": "; ".join(notes)})
    return rows


def _drawings(drawings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first few diagrams, changed ones first."""
    changed = sorted(drawings, key=lambda drawing: drawing["before"] == drawing["after"])
    return changed[:MOST_DRAWINGS]
