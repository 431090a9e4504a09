"""Summaries of committed results: families and pipelines as the tables that README and docs include."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritium import fidelity
from tritium.bench.results import OURS, YARDSTICK, Row
from tritium.bench.run import DTYPES, EAGER, TREES
from tritium.bench.sides import OPTIMIZED

# Names of the variants in tables.
SIDES: Mapping[str, str] = {
    EAGER: "eager",
    YARDSTICK: "torch.compile",
    TREES: "torch.compile, reduce-overhead",
    OURS: 'torch.compile(backend="tritium")',
    OPTIMIZED: "tritium.optimize",
}


def by_workload(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Group rows as {workload: {variant: row}}, in their order."""
    grouped: dict[str, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(row.workload, {})[row.variant] = row
    return grouped


def ratios(rows: Iterable[Row], variant: str = OPTIMIZED, against: str = YARDSTICK) -> dict[str, float]:
    """Map each workload to the speed of a variant relative to another, where both were measured."""
    return {
        workload: sides[against].median_ms / sides[variant].median_ms
        for workload, sides in by_workload(rows).items()
        if variant in sides and against in sides
    }


def spread(found: Mapping[str, float]) -> str:
    """Name the worst, the median and the best of some ratios.

    >>> spread({"flux": 1.25, "wan": 1.0, "sdxl": 1.5})
    'worst 1.00 (wan), median 1.25, best 1.50 (sdxl) of 3'
    """
    worst, best = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    median = statistics.median(found.values())
    return f"worst {found[worst]:.2f} ({worst}), median {median:.2f}, best {found[best]:.2f} ({best}) of {len(found)}"


def families_summary(rows: Sequence[Row]) -> list[list[str]]:
    """List [what, against torch.compile, against eager] for every variant that was measured; the default comes first."""
    lines = []
    for variant in (OPTIMIZED, OURS):
        cells = [ratios(rows, variant, against) for against in (YARDSTICK, EAGER)]
        if cells[0]:
            lines.append([f"`{SIDES[variant]}`", *map(spread, cells)])
    return lines


def families_table(rows: Sequence[Row]) -> list[list[str]]:
    """List one line a family: milliseconds a side, ratios, first calls and recompiles."""
    return [_family(workload, sides) for workload, sides in by_workload(rows).items()]


FAMILIES_HEADER = [
    "family",
    "eager",
    "torch.compile",
    "tritium.optimize",
    "over torch.compile",
    'backend="tritium" alone',
    "first call, s: torch.compile / optimize / backend",
    "recompiles",
    "relative L2: torch.compile / optimize",
]


def _family(workload: str, sides: Mapping[str, Row]) -> list[str]:
    reduced = sides.get(TREES)
    theirs = _milliseconds(sides.get(YARDSTICK)) + (f" (reduce-overhead {_milliseconds(reduced)})" if reduced else "")
    first = " / ".join(_cell(sides.get(name), "first_call_s", ".1f") for name in (YARDSTICK, OPTIMIZED, OURS))
    errors = " / ".join(_cell(sides.get(name), "relative_l2", ".1e") for name in (YARDSTICK, OPTIMIZED))
    return [
        workload + (" (shrunk)" if any(row.shrunk for row in sides.values()) else ""),
        _milliseconds(sides.get(EAGER)),
        theirs,
        _milliseconds(sides.get(OPTIMIZED)),
        _cell(sides.get(OPTIMIZED), "ratio", ".2f"),
        _milliseconds(sides.get(OURS)),
        first,
        _cell(sides.get(OPTIMIZED), "recompiles", "d"),
        errors,
    ]


PIPELINE_HEADER = ["size", "side", "ms an image", "over torch.compile", "first image, s", "peak GiB", "PSNR, dB"]


def pipeline_table(rows: Sequence[Row]) -> list[list[str]]:
    """List one line for every size and side of a pipeline."""
    lines = []
    for sides in by_workload(rows).values():
        for variant, row in sides.items():
            lines.append(
                [
                    f"{row.shapes['pixels'][-1]} x {row.shapes['pixels'][-2]}" + (" (shrunk)" if row.shrunk else ""),
                    _pipeline_side(variant),
                    f"{row.median_ms:.0f}",
                    _cell(row, "ratio", ".2f"),
                    f"{row.first_call_s:.1f}",
                    "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.1f}",
                    "" if variant == EAGER else "equal" if row.psnr is None else f"{row.psnr:.1f}",
                ]
            )
    return lines


def _pipeline_side(variant: str) -> str:
    return "`compile_repeated_blocks` and a compiled `vae.decode`" if variant == YARDSTICK else SIDES[variant]


def compile_time_summary(rows: Sequence[Row]) -> list[str]:
    """Say for each side how Inductor's time and the first call grow from the fewest blocks to the most."""
    few, *_, many = by_workload(rows).items() if len(by_workload(rows)) > 1 else [("", {}), ("", {})]
    lines = []
    for variant, row in many[1].items():
        less = few[1].get(variant)
        if less is not None and row.inductor_s is not None and less.inductor_s:
            lines.append(
                f"{variant}: {row.inductor_s:.1f} s in Inductor for {many[0]}, {row.inductor_s / less.inductor_s:.2f} times "
                f"that for {few[0]}; first calls {row.first_call_s:.1f} and {less.first_call_s:.1f} s"
            )
    return lines


def outside_contract(rows: Iterable[Row]) -> list[str]:
    """Name every side whose error against float64 exceeds what fidelity `close` allows."""
    found = []
    for workload, sides in by_workload(rows).items():
        eager = sides.get(EAGER)
        if eager is None or eager.error_f64 is None:
            continue
        for variant, row in sides.items():
            allowed = fidelity.allowance(eager.error_f64, DTYPES[eager.dtype])
            if row.error_f64 is not None and not row.error_f64 <= allowed:
                found.append(f"{workload}, {variant}: error {row.error_f64:.2e}, allowed {allowed:.2e}")
    return found


def _milliseconds(row: Row | None) -> str:
    return "-" if row is None else f"{row.median_ms:.2f} ms"


def _cell(row: Row | None, name: str, form: str) -> str:
    value: Any = None if row is None else getattr(row, name)
    return "-" if value is None else format(value, form)
