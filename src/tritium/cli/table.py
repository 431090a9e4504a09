"""Print benchmark rows as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from tritium.bench.results import Results, Row

_NAMES = {
    "eager": "eager",
    "inductor": "torch.compile",
    "tritium": "Tritium",
    "inductor reduce-overhead": "torch.compile",
}

# Without a terminal: wide enough for all columns.
_FILE_WIDTH = 160


def show(results: Results) -> None:
    """Print results on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(of_results(results))


def show_kernels(results: Results, most: int = 15) -> None:
    """Print the longest kernels of each profiled variant."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for row in results.rows:
        if row.kernels:
            total = sum(kernel["us"] for kernel in row.kernels)
            table = Table(
                title=f"{row.workload}, {_NAMES.get(row.variant, row.variant)}: {total / 1e3:.2f} ms in kernels"
            )
            for name in ("us", "calls"):
                table.add_column(name, justify="right")
            table.add_column("kernel", no_wrap=True)
            for kernel in row.kernels[:most]:
                table.add_row(f"{kernel['us']:.1f}", f"{kernel['calls']:g}", kernel["name"])
            console.print(table)


def gains(results: Results) -> list[str]:
    """Return a line with the gain of fusion for each profiled compiled variant."""
    unfused = {row.workload: row.operators_us for row in results.rows if row.variant == "eager"}
    lines = []
    for row in results.rows:
        before = unfused.get(row.workload)
        if row.fusion_gain is not None and row.operators_us is not None and before is not None:
            lines.append(
                f"{row.workload}, {_NAMES.get(row.variant, row.variant)}: {row.operators_us / 1e3:.2f} ms in operators and "
                f"kernels, eagerly {before / 1e3:.2f} ms: fusion gain {row.fusion_gain:+.1%}"
            )
    if lines:
        lines.append("fusion gain: (fused total - unfused total) / unfused total, below 0 is time saved")
    return lines


def of_results(results: Results) -> Table:
    """Return a table with one line per variant, and columns for the optional fields in the rows."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items() if version)
    title = f"{results.device['name']}; {versions}"
    table = Table(title=title, caption=_caption(results.rows), caption_justify="left", box=box.SIMPLE_HEAD)
    with_memory = any(row.peak_memory_bytes is not None for row in results.rows)
    for name in ("workload", "variant"):
        table.add_column(name, no_wrap=True)
    with_images = any(row.ssim is not None for row in results.rows)
    with_static = any(row.against_static is not None for row in results.rows)
    with_errors = any(row.error_f64 is not None for row in results.rows)
    eager_errors = {row.workload: row.error_f64 for row in results.rows if row.variant == "eager"}
    with_host = any(row.host_us is not None for row in results.rows)
    with_recompiles = any(row.recompiles is not None for row in results.rows)
    with_inductor = any(row.inductor_s is not None for row in results.rows)
    figures = ["median ms", "quartiles", "ratio", "first call s", "relative L2"]
    for name in (
        *figures,
        *["error, of eager's"] * with_errors,
        *["host us"] * with_host,
        *["recompiles"] * with_recompiles,
        *["in Inductor s"] * with_inductor,
        *["of static"] * with_static,
        *["PSNR dB", "SSIM"] * with_images,
        *["peak GiB"] * with_memory,
    ):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in results.rows:
        if last is not None and row.workload != last:
            table.add_section()
        cells = [row.workload if row.workload != last else "", *_cells(row)]
        cells += [_error(row, eager_errors.get(row.workload))] * with_errors
        cells += [_host_time(row.host_us)] * with_host
        cells += [str(row.recompiles) if row.recompiles is not None else "-"] * with_recompiles
        cells += [f"{row.inductor_s:.1f}" if row.inductor_s is not None else "-"] * with_inductor
        cells += [f"{row.against_static:.2f}x" if row.against_static is not None else "-"] * with_static
        cells += [*_image_cells(row)] * with_images
        cells += [f"{row.peak_memory_bytes / 2**30:.2f}" if row.peak_memory_bytes is not None else "-"] * with_memory
        table.add_row(*cells)
        last = row.workload
    return table


def _cells(row: Row) -> list[str]:
    mode = f" ({row.mode})" if row.mode not in (None, "default") else ""
    return [
        _NAMES.get(row.variant, row.variant.replace("tritium", "Tritium", 1)) + mode,
        f"{row.median_ms:.2f}",
        f"{row.lower_quartile_ms:.2f}-{row.upper_quartile_ms:.2f}",
        f"{row.ratio:.2f}x" if row.ratio is not None else "-",
        f"{row.first_call_s:.1f}",
        f"{row.relative_l2:.1e}",
    ]


def _host_time(microseconds: float | None) -> str:
    """Format the time of a whole call without decimals, and of a single kernel with one."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _error(row: Row, eager: float | None) -> str:
    if row.error_f64 is None:
        return "-"
    return f"{row.error_f64:.1e}" + (f" {row.error_f64 / eager:.2f}x" if eager else "")


def _image_cells(row: Row) -> list[str]:
    if row.ssim is None:
        return ["-", "-"]
    return ["equal" if row.psnr is None else f"{row.psnr:.1f}", f"{row.ssim:.4f}"]


def _start(row: Row) -> str:
    told = f"{row.workload}: {row.restart_s:.1f} s to the first image of another process with compile artifacts"
    if row.cold_start_s is None:
        return told
    assert row.restart_s is not None
    return f"{told}, {row.restart_s / row.cold_start_s:.0%} of {row.cold_start_s:.1f} s with empty caches"


def _caption(rows: Sequence[Row]) -> str:
    about = dict.fromkeys(f"{row.workload}: {row.note}, {row.dtype}" + _shrunk(row) for row in rows)
    cold = "with empty caches" if all(row.first_call_cold for row in rows) else "caches as they were"
    notes = list(about)
    # The notes of functions name their baseline.
    if not all("ratio against" in row.note for row in rows):
        notes.append("ratio: torch.compile's median by this one's, above 1 is faster")
    notes.append(f"first call: includes compilation, {cold}; relative L2: against eager")
    if any(row.against_static is not None for row in rows):
        notes.append("of static: this median by that of torch.compile with static sizes, above 1 is slower")
    if any(row.error_f64 is not None for row in rows):
        notes.append("error: largest difference from a float64 run by its largest value")
    if any(row.host_us is not None for row in rows):
        notes.append("host us: until a call returns on the host, the device left to itself")
    notes += [_start(row) for row in rows if row.restart_s is not None]
    notes += dict.fromkeys(f"{row.workload}, {row.variant}: {row.remark}" for row in rows if row.remark)
    disturbed = sorted({row.workload for row in rows if row.disturbed})
    if disturbed:
        notes.append(f"DISTURBED: other processes took cores while {', '.join(disturbed)} was timed; run again")
    return "\n".join(notes)


def _shrunk(row: Row) -> str:
    return " (shrunk for the CPU: says nothing about the full model)" if row.shrunk else ""
