"""Format a report as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritium import compat
from tritium.report.observation import Kernel
from tritium.report.units import bytes_text

if TYPE_CHECKING:
    from tritium.report import Report

# Pairs of kernels in the text of a report; the data has all.
MOST_PAIRS = 20


def of_report(report: Report) -> str:
    """Return the report as text, with one section per kind of record."""
    sections = [
        _machine,
        components,
        _graphs,
        _sites,
        _attention,
        _operators,
        _recompiles,
        _violations,
        _captures,
        _passes,
        _kernels,
        _pairs,
        _frozen,
        _failures,
    ]
    return "\n\n".join(text for section in sections if (text := section(report)))


def _machine(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in compat.versions.versions().items() if version)
    return f"Tritium report: {versions}; {report.device['type']} {report.device['name']}"


def components(report: Report) -> str:
    rows = []
    for component in report.components:
        time = "-" if component.milliseconds is None else f"{component.milliseconds:.2f}"
        share = "-" if component.share is None else f"{component.share:.0%}"
        first = f"{component.first_call_seconds:.1f}" if component.first_call_seconds else "-"
        rows.append((component.name, component.calls, time, share, first, component.what))
    header = ("component", "calls", "ms a call", "share", "s compiling", "what was done")
    return _table("Components", header, rows) if rows else ""


def _graphs(report: Report) -> str:
    rows = []
    for record in report.records:
        end = record.break_reason or "returns"
        if record.needs_gradients:
            end += " [needs gradients: left to Inductor]"
        rows.append((record.graph, record.function, record.engine, record.nodes, f"{record.seconds:.2f}", end))
    return _table("Graphs", ("graph", "function", "engine", "nodes", "seconds", "ends because"), rows)


def _sites(report: Report) -> str:
    rows = []
    for family, counts in report.sites.items():
        reasons = "; ".join(f"{count}x {reason}" for reason, count in counts.reasons.most_common())
        rows.append((family, counts.fused, counts.inductor, counts.declined, reasons))
    return _table("Sites", ("family", "fused", "inductor", "declined", "why"), rows)


def _attention(report: Report) -> str:
    rows = [(entry["graph"], entry["by"], entry["what"]) for entry in report.attention]
    return _table("Attention", ("graph", "by", "what"), rows) if rows else ""


def _operators(report: Report) -> str:
    """Return Inductor's operators: generated code, or fallback calls with reasons."""
    lines = [f"Lowered {entry['count']}x {entry['op']}" for entry in report.lowered]
    for entry in report.fallbacks:
        first, *others = entry["arguments"] or [""]
        more = f" and {len(others)} other shapes" if others else ""
        lines.append(
            f"Fallback {entry['count']}x {entry['op'].partition('(')[0]}({first}){more}  # {entry['reason']}, "
            f"has_lowering={entry.get('has_lowering')}, has_decomposition={entry.get('has_decomposition')}"
        )
    title = "Operators (lowered: became generated code; fallback: Inductor calls them instead)"
    return "\n".join([title, *lines]) if lines else ""


def _pairs(report: Report) -> str:
    pairs = [(record.graph, pair) for record in report.records for pair in record.not_fused]
    pairs.sort(key=lambda entry: -entry[1].count * (entry[1].bytes_passed + entry[1].bytes_shared))
    rows = [
        (
            *(graph, pair.first, pair.second, f"{pair.count}x"),
            *(bytes_text(pair.bytes_passed), bytes_text(pair.bytes_shared), pair.reason),
        )
        for graph, pair in pairs[:MOST_PAIRS]
    ]
    title = "Not fused (pairs of kernels: the second reads what the first writes, or both read the same)"
    if len(pairs) > MOST_PAIRS:
        title += f"; the {MOST_PAIRS} that move most of {len(pairs)}"
    header = ("graph", "first", "second", "times", "passes", "both read", "Inductor's reason")
    return _table(title, header, rows) if rows else ""


def _recompiles(report: Report) -> str:
    rows = [
        (
            entry["graph"],
            entry["argument"] or "-",
            entry["was"] or "-",
            entry["now"] or "-",
            str(entry["reason"]) + (f"; to prevent it: {entry['suggestion']}" if entry["suggestion"] else ""),
        )
        for entry in report.recompiles
    ]
    return _table("Recompiles", ("graph", "argument", "was", "now", "reason"), rows) if rows else ""


def _violations(report: Report) -> str:
    rows = [
        (
            entry.part,
            f"{entry.times}x {entry.done}",
            entry.what + (f"; to prevent it: {entry.suggestion}" if entry.suggestion else ""),
        )
        for entry in report.violations
    ]
    return _table("Calls outside of the promised shapes", ("part", "done", "what was new"), rows) if rows else ""


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
    return _table("Captures", ("graph", "replays", "bytes", "results", "bucket"), rows) if rows else ""


def _passes(report: Report) -> str:
    rows = [
        (record.graph, entry.name, "yes" if entry.changed else "no", f"{entry.seconds:.3f}", entry.notes or "-")
        for record in report.records
        for entry in record.passes
    ]
    return _table("Passes", ("graph", "pass", "changed", "seconds", "requests, declines"), rows) if rows else ""


def _kernels(report: Report) -> str:
    if not any(record.kernels for record in report.records):
        missing = [record.graph for record in report.records if record.engine == "inductor"]
        return f"Kernels: none recorded for graph {', '.join(missing)}" if missing else ""
    header = ["graph", "kernel", "times", "us each", "moves", "region", "operators"]
    rows = [
        [record.graph, *_kernel_row(kernels)]
        for record in report.records
        for kernels in record.kernels_by_name().values()
    ]
    launches = sum(kernel.count for record in report.records for kernel in record.kernels)
    title = f"Kernels ({launches} launches; region = bytes the whole memory-bound region must move)"
    if report.measurement is None:
        for row in [header, *rows]:
            del row[3]
    return _table(title, header, rows)


def _kernel_row(kernels: Sequence[Kernel]) -> list[str]:
    first = kernels[0]
    times = [kernel.measured_us for kernel in kernels if kernel.measured_us is not None]
    return [
        first.name,
        f"{sum(kernel.count for kernel in kernels)}x",
        f"{statistics.fmean(times):.1f}" if times else "-",
        bytes_text(first.bytes_moved),
        bytes_text(first.ideal_bytes),
        " ".join(first.ops),
    ]


def _frozen(report: Report) -> str:
    rows = [
        (
            entry["graph"],
            entry["value"],
            bytes_text(entry["bytes"]),
            ", ".join(entry["sources"]),
            entry["declined"] or "-",
        )
        for entry in report.frozen
    ]
    return _table("Frozen", ("graph", "value", "bytes", "from", "declined"), rows) if rows else ""


def _failures(report: Report) -> str:
    lines = []
    for entry in report.failures:
        where = f" (graphs in {entry['graphs_at']})" if entry["graphs_at"] else ""
        lines.append(f"{entry['graph']} {entry['part']} turned off: {entry['reason']}{where}")
    return "\n".join(["Failures", *lines]) if lines else ""


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with left-aligned columns; only the last may exceed 48 characters."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [min(48, max(len(row[i]) for row in cells)) for i in range(len(header) - 1)]
    lines = [title]
    for row in cells:
        fixed = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True))
        lines.append(f"  {fixed}  {row[-1]}".rstrip())
    return "\n".join(lines)
