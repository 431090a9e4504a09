"""Format a report as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tritium import compat

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
    pairs = sorted(report.not_fused, key=lambda pair: -pair["count"] * (pair["bytes_passed"] + pair["bytes_shared"]))
    rows = [
        (
            pair["graph"],
            pair["first"],
            pair["second"],
            f"{pair['count']}x",
            _bytes(pair["bytes_passed"]),
            _bytes(pair["bytes_shared"]),
            pair["reason"],
        )
        for pair in pairs[:MOST_PAIRS]
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
            _bytes(entry["bytes"]),
            "not captured" if entry["declined"] else "copied" if entry["copies"] else "lent",
            entry["bucket"] + (f": {entry['declined']}" if entry["declined"] else ""),
        )
        for entry in report.captures
    ]
    return _table("Captures", ("graph", "replays", "bytes", "results", "bucket"), rows) if rows else ""


def _passes(report: Report) -> str:
    rows = []
    for entry in report.passes:
        notes = [f"{request['settings']} because {request['because']}" for request in entry["requests"]]
        notes += [entry["summary"]] if entry["summary"] else []
        notes += [f"{count}x left alone: {reason}" for reason, count in entry["left_alone"].items()]
        if entry["declined"]:
            notes.append(f"declined: {entry['declined']}")
        if entry["failed"]:
            notes.append(f"FAILED: {entry['failed']}")
        changed = "yes" if entry["changed"] else "no"
        rows.append((entry["graph"], entry["name"], changed, f"{entry['seconds']:.3f}", "; ".join(notes) or "-"))
    return _table("Passes", ("graph", "pass", "changed", "seconds", "requests, declines"), rows) if rows else ""


def _kernels(report: Report) -> str:
    if not report.kernels:
        missing = [record.graph for record in report.records if record.engine == "inductor"]
        return f"Kernels: none recorded for graph {', '.join(missing)}" if missing else ""
    # Equal blocks generate the same kernel repeatedly: show it in one row.
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kernel in report.kernels:
        groups.setdefault((kernel["graph"], kernel["name"]), []).append(kernel)
    rows = []
    for place, same in groups.items():
        kernel = same[0]
        moved = _bytes(kernel["bytes_read"] + kernel["bytes_written"])
        taken = [entry["measured_us"] for entry in same if entry["measured_us"] is not None]
        us = f"{sum(taken) / len(taken):.1f}" if taken else "-"
        times = sum(entry["count"] for entry in same)
        rows.append([*place, f"{times}x", us, moved, _bytes(kernel["ideal_bytes"]), " ".join(kernel["ops"])])
    launches = sum(kernel["count"] for kernel in report.kernels)
    title = f"Kernels ({launches} launches; region = bytes the whole memory-bound region must move)"
    header = ["graph", "kernel", "times", "us each", "moves", "region", "operators"]
    if report.measurement is None:
        for row in [header, *rows]:
            del row[3]
    return _table(title, header, rows)


def _frozen(report: Report) -> str:
    rows = [
        (
            entry["graph"],
            entry["value"],
            _bytes(entry["bytes"]),
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


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with left-aligned columns; only the last may exceed 48 characters."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [min(48, max(len(row[i]) for row in cells)) for i in range(len(header) - 1)]
    lines = [title]
    for row in cells:
        fixed = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True))
        lines.append(f"  {fixed}  {row[-1]}".rstrip())
    return "\n".join(lines)
