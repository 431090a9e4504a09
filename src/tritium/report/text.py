"""Format a report as text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritium import compat
from tritium.report.html.kernels import Kernels
from tritium.report.units import bytes_text

if TYPE_CHECKING:
    from tritium.report import Report

# Pairs of kernels in the text of a report; the data has all.
MOST_PAIRS = 20


def of_report(report: Report) -> str:
    """Return the report as text, with one section per kind of record."""
    versions = ", ".join(f"{name} {version}" for name, version in compat.versions.versions().items() if version)
    attention = [(entry["graph"], entry["by"], entry["what"]) for entry in report.attention]
    sections = [
        f"Tritium report: {versions}; {report.device['type']} {report.device['name']}",
        components(report),
        _graphs(report),
        _sites(report),
        _table("Attention", "graph, by, what", attention),
        _operators(report),
        _recompiles(report),
        _violations(report),
        _captures(report),
        _passes(report),
        _kernels(report),
        _pairs(report),
        _frozen(report),
        _failures(report),
    ]
    return "\n\n".join(section for section in sections if section)


def components(report: Report) -> str:
    rows = [
        (
            component.name,
            component.calls,
            _formatted(component.milliseconds, ".2f"),
            _formatted(component.share, ".0%"),
            _formatted(component.first_call_seconds or None, ".1f"),
            component.what,
        )
        for component in report.components
    ]
    return _table("Components", "component, calls, ms a call, share, s compiling, what was done", rows)


def _graphs(report: Report) -> str:
    rows = []
    for record in report.records:
        end = record.break_reason or "returns"
        if record.needs_gradients:
            end += " [needs gradients: left to Inductor]"
        rows.append((record.graph, record.function, record.engine, record.nodes, f"{record.seconds:.2f}", end))
    return _table("Graphs", "graph, function, engine, nodes, seconds, ends because", rows)


def _sites(report: Report) -> str:
    rows = []
    for family, counts in report.sites.items():
        reasons = "; ".join(f"{count}x {reason}" for reason, count in Counter(counts.reasons).most_common())
        rows.append((family, counts.fused, counts.inductor, counts.declined, reasons))
    return _table("Sites", "family, fused, inductor, declined, why", rows)


def _operators(report: Report) -> str:
    lines = [f"Lowered {entry['count']}x {entry['op']}" for entry in report.lowered]
    for entry in report.fallbacks:
        first, *others = entry["arguments"] or [""]
        more = f" and {len(others)} other shapes" if others else ""
        lines.append(
            f"Fallback {entry['count']}x {entry['op'].partition('(')[0]}({first}){more}  # {entry['reason']}, "
            f"has_lowering={entry['has_lowering']}, has_decomposition={entry['has_decomposition']}"
        )
    return _lines("Operators (lowered: became generated code; fallback: Inductor calls them instead)", lines)


def _recompiles(report: Report) -> str:
    rows = [
        (*(entry[name] for name in ("graph", "argument", "was", "now")), _advised(entry["reason"], entry["suggestion"]))
        for entry in report.recompiles
    ]
    return _table("Recompiles", "graph, argument, was, now, reason", rows)


def _violations(report: Report) -> str:
    rows = [
        (entry.part, f"{entry.times}x {entry.done}", _advised(entry.what, entry.suggestion))
        for entry in report.violations
    ]
    return _table("Calls outside of the promised shapes", "part, done, what was new", rows)


def _advised(reason: str | None, suggestion: str | None) -> str:
    return f"{reason}; to prevent it: {suggestion}" if suggestion else str(reason)


def _captures(report: Report) -> str:
    rows = [
        (
            entry["graph"] if entry["piece"] is None else f"{entry['graph']} piece {entry['piece']}",
            entry["hits"],
            bytes_text(entry["bytes"]),
            "not captured" if entry["declined"] else "copied" if entry["copies"] else "lent",
            entry["bucket"] + (f": {entry['declined']}" if entry["declined"] else ""),
        )
        for entry in report.captures
    ]
    return _table("Captures", "graph, replays, bytes, results, bucket", rows)


def _passes(report: Report) -> str:
    rows = [
        (record.graph, entry.name, "yes" if entry.changed else "no", f"{entry.seconds:.3f}", entry.notes or "-")
        for record in report.records
        for entry in record.passes
    ]
    return _table("Passes", "graph, pass, changed, seconds, requests and declines", rows)


def _kernels(report: Report) -> str:
    if not any(record.kernels for record in report.records):
        missing = [record.graph for record in report.records if record.engine == "inductor"]
        return f"Kernels: none recorded for graph {', '.join(missing)}" if missing else ""
    kernels = Kernels(report)
    rows = []
    for row in itertools.chain.from_iterable(map(kernels.rows_of, report.records)):
        each = [_formatted(row.us, ".1f")] if kernels.measured else []
        moves = (bytes_text(row.moved), bytes_text(row.kernel.ideal_bytes))
        rows.append((row.graph, row.kernel.name, f"{row.launches}x", *each, *moves, " ".join(row.kernel.ops)))
    launches = sum(row.launches for row in kernels.rows)
    title = f"Kernels ({launches} launches; region = bytes the whole memory-bound region must move)"
    each_us = "us each, " if kernels.measured else ""
    return _table(title, f"graph, kernel, times, {each_us}moves, region, operators", rows)


def _pairs(report: Report) -> str:
    pairs = [(record.graph, pair) for record in report.records for pair in record.not_fused]
    pairs.sort(key=lambda entry: -entry[1].count * (entry[1].bytes_passed + entry[1].bytes_shared))
    rows = []
    for graph, pair in pairs[:MOST_PAIRS]:
        moves = (bytes_text(pair.bytes_passed), bytes_text(pair.bytes_shared))
        rows.append((graph, pair.first, pair.second, f"{pair.count}x", *moves, pair.reason))
    title = "Not fused (pairs of kernels: the second reads what the first writes, or both read the same)"
    if len(pairs) > MOST_PAIRS:
        title += f"; the {MOST_PAIRS} that move most of {len(pairs)}"
    return _table(title, "graph, first, second, times, passes, both read, Inductor's reason", rows)


def _frozen(report: Report) -> str:
    rows = [
        (entry["graph"], entry["value"], bytes_text(entry["bytes"]), ", ".join(entry["sources"]), entry["declined"])
        for entry in report.frozen
    ]
    return _table("Frozen", "graph, value, bytes, from, declined", rows)


def _failures(report: Report) -> str:
    lines = []
    for entry in report.failures:
        where = f" (graphs in {entry['graphs_at']})" if entry["graphs_at"] else ""
        lines.append(f"{entry['graph']} {entry['part']} turned off: {entry['reason']}{where}")
    return _lines("Failures", lines)


def _formatted(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _lines(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *lines]) if lines else ""


def _table(title: str, columns: str, rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with left-aligned columns, empty without rows; only the last may exceed 48 characters."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in [columns.split(", "), *rows]]
    widths = [min(48, max(map(len, column))) for column in zip(*cells, strict=True)]
    lines = ("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in cells)
    return _lines(title, [f"  {line}".rstrip() for line in lines] if rows else [])
