"""Print benchmark rows as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tritium.bench.results import EAGER, INDUCTOR, REDUCE_OVERHEAD, Results, Row

# Without a terminal: wide enough for all columns of any table.
_FILE_WIDTH = 160


def console() -> Console:
    found = Console()
    if not found.is_terminal:
        found.width = _FILE_WIDTH
    return found


@dataclass(frozen=True)
class _Column:
    """A column, which is shown if a row has a value for it."""

    name: str
    cell: Callable[[Row], str | None]
    # Explains the figures, below the table.
    note: str = ""


def _field(name: str, form: str) -> Callable[[Row], str | None]:
    def cell(row: Row) -> str | None:
        value: Any = getattr(row, name)
        return None if value is None else form.format(value)

    return cell


def _host_time(row: Row) -> str | None:
    """Format the time of a whole call without decimals, and of a single kernel with one."""
    return None if row.host_us is None else f"{row.host_us:.0f}" if row.host_us >= 100 else f"{row.host_us:.1f}"


def _columns(rows: Sequence[Row]) -> list[_Column]:
    eager = {row.workload: row.error_f64 for row in rows if row.variant == EAGER}

    def error(row: Row) -> str | None:
        times = f" {row.error_f64 / scale:.2f}x" if row.error_f64 and (scale := eager.get(row.workload)) else ""
        return None if row.error_f64 is None else f"{row.error_f64:.1e}{times}"

    return [
        _Column("median ms", _field("median_ms", "{:.2f}")),
        _Column("quartiles", lambda row: f"{row.lower_quartile_ms:.2f}-{row.upper_quartile_ms:.2f}"),
        _Column("ratio", _field("ratio", "{:.2f}x")),
        _Column("first call s", _field("first_call_s", "{:.1f}")),
        _Column("relative L2", _field("relative_l2", "{:.1e}")),
        _Column("error, of eager's", error, "error: largest difference from a float64 run by its largest value"),
        _Column("host us", _host_time, "host us: until a call returns on the host, the device left to itself"),
        _Column("recompiles", _field("recompiles", "{}")),
        _Column("in Inductor s", _field("inductor_s", "{:.1f}")),
        _Column(
            "of static",
            _field("against_static", "{:.2f}x"),
            "of static: this median by that of torch.compile with static sizes, above 1 is slower",
        ),
        _Column(
            "PSNR dB",
            lambda row: None if row.ssim is None else "equal" if row.psnr is None else f"{row.psnr:.1f}",
        ),
        _Column("SSIM", _field("ssim", "{:.4f}")),
        _Column(
            "peak GiB",
            lambda row: None if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f}",
        ),
    ]


def show(results: Results) -> None:
    """Print a line for each variant, and what the figures mean."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items() if version)
    rows = results.rows
    filled = [(column, [column.cell(row) for row in rows]) for column in _columns(rows)]
    shown = [(column, cells) for column, cells in filled if any(cells)]
    table = Table(
        title=f"{results.device['name']}; {versions}",
        caption="\n".join(_notes(rows, [column.note for column, _ in shown if column.note])),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("workload", "variant"):
        table.add_column(name, no_wrap=True)
    for column, _ in shown:
        table.add_column(column.name, justify="right", no_wrap=True)
    last = None
    for index, row in enumerate(rows):
        if last is not None and row.workload != last:
            table.add_section()
        mode = f" ({row.mode})" if row.mode not in (None, "default") else ""
        first = "" if row.workload == last else row.workload
        table.add_row(first, _name(row) + mode, *(cells[index] or "-" for _, cells in shown))
        last = row.workload
    console().print(table)


def _name(row: Row) -> str:
    if row.variant in (INDUCTOR, REDUCE_OVERHEAD):
        return "torch.compile"
    return row.variant.replace("tritium", "Tritium", 1)


def _notes(rows: Sequence[Row], of_columns: Sequence[str]) -> list[str]:
    shrunk = " (shrunk for the CPU: says nothing about the full model)"
    notes = list(dict.fromkeys(f"{row.workload}: {row.note}, {row.dtype}{shrunk * row.shrunk}" for row in rows))
    # The notes of functions name their baseline.
    if not all("ratio against" in row.note for row in rows):
        notes.append("ratio: torch.compile's median by this one's, above 1 is faster")
    cold = "with empty caches" if all(row.first_call_cold for row in rows) else "caches as they were"
    notes += [f"first call: includes compilation, {cold}; relative L2: against eager", *of_columns]
    for row in rows:
        if row.restart_s is not None:
            start = (
                f"{row.workload}: {row.restart_s:.1f} s to the first image of another process with compile artifacts"
            )
            share = "" if row.cold_start_s is None else f", {row.restart_s / row.cold_start_s:.0%}"
            notes.append(start + (share and f"{share} of {row.cold_start_s:.1f} s with empty caches"))
    notes += dict.fromkeys(f"{row.workload}, {row.variant}: {row.remark}" for row in rows if row.remark)
    disturbed = sorted({row.workload for row in rows if row.disturbed})
    if disturbed:
        notes.append(f"DISTURBED: other processes took cores while {', '.join(disturbed)} was timed; run again")
    return notes


def show_kernels(results: Results, most: int = 15) -> None:
    """Print the longest kernels of each profiled variant."""
    for row in results.rows:
        if row.kernels:
            total = sum(kernel["us"] for kernel in row.kernels)
            table = Table(title=f"{row.workload}, {_name(row)}: {total / 1e3:.2f} ms in kernels")
            for name in ("us", "calls"):
                table.add_column(name, justify="right")
            table.add_column("kernel", no_wrap=True)
            for kernel in row.kernels[:most]:
                table.add_row(f"{kernel['us']:.1f}", f"{kernel['calls']:g}", kernel["name"])
            console().print(table)


def gains(results: Results) -> list[str]:
    """Return a line with the gain of fusion for each profiled compiled variant."""
    unfused = {row.workload: row.operators_us for row in results.rows if row.variant == EAGER}
    lines = []
    for row in results.rows:
        before = unfused.get(row.workload)
        if row.fusion_gain is not None and row.operators_us is not None and before is not None:
            lines.append(
                f"{row.workload}, {_name(row)}: {row.operators_us / 1e3:.2f} ms in operators and "
                f"kernels, eagerly {before / 1e3:.2f} ms: fusion gain {row.fusion_gain:+.1%}"
            )
    if lines:
        lines.append("fusion gain: (fused total - unfused total) / unfused total, below 0 is time saved")
    return lines
