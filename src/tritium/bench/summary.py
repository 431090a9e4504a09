"""Summaries of committed results: families and pipelines as the tables that README and docs include."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritium import fidelity
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, REDUCE_OVERHEAD, TRITIUM, Row
from tritium.bench.settings import DTYPES

# Names of the variants in tables.
VARIANTS: Mapping[str, str] = {
    EAGER: "eager",
    INDUCTOR: "torch.compile",
    REDUCE_OVERHEAD: "torch.compile, reduce-overhead",
    TRITIUM: 'torch.compile(backend="tritium")',
    OPTIMIZED: "tritium.optimize",
}


def by_workload(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Group rows as {workload: {variant: row}}, in their order."""
    grouped: dict[str, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(row.workload, {})[row.variant] = row
    return grouped


def ratios(rows: Iterable[Row], variant: str = OPTIMIZED, against: str = INDUCTOR) -> dict[str, float]:
    """Map each workload to the speed of a variant relative to another, where both were measured."""
    return {
        workload: variants[against].median_ms / variants[variant].median_ms
        for workload, variants in by_workload(rows).items()
        if variant in variants and against in variants
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
    for variant in (OPTIMIZED, TRITIUM):
        cells = [ratios(rows, variant, against) for against in (INDUCTOR, EAGER)]
        if cells[0]:
            lines.append([f"`{VARIANTS[variant]}`", *map(spread, cells)])
    return lines


def families_table(rows: Sequence[Row]) -> list[list[str]]:
    """List one line a family: milliseconds a variant, ratios, first calls and recompiles."""
    return [_family(workload, variants) for workload, variants in by_workload(rows).items()]


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


def _family(workload: str, variants: Mapping[str, Row]) -> list[str]:
    reduced = variants.get(REDUCE_OVERHEAD)
    theirs = _milliseconds(variants.get(INDUCTOR)) + (f" (reduce-overhead {_milliseconds(reduced)})" if reduced else "")
    ours = variants.get(OPTIMIZED)
    first = (_cell(variants.get(name), "first_call_s", ".1f") for name in (INDUCTOR, OPTIMIZED, TRITIUM))
    errors = (_cell(variants.get(name), "relative_l2", ".1e") for name in (INDUCTOR, OPTIMIZED))
    return [
        workload + " (shrunk)" * any(row.shrunk for row in variants.values()),
        _milliseconds(variants.get(EAGER)),
        theirs,
        _milliseconds(ours),
        _cell(ours, "ratio", ".2f"),
        _milliseconds(variants.get(TRITIUM)),
        " / ".join(first),
        _cell(ours, "recompiles", "d"),
        " / ".join(errors),
    ]


PIPELINE_HEADER = ["size", "variant", "ms an image", "over torch.compile", "first image, s", "peak GiB", "PSNR, dB"]


def pipeline_table(rows: Sequence[Row]) -> list[list[str]]:
    """List one line for every size and variant of a pipeline."""
    names = {**VARIANTS, INDUCTOR: "`compile_repeated_blocks` and a compiled `vae.decode`"}
    return [
        [
            f"{row.shapes['pixels'][-1]} x {row.shapes['pixels'][-2]}" + " (shrunk)" * row.shrunk,
            names[row.variant],
            f"{row.median_ms:.0f}",
            _cell(row, "ratio", ".2f"),
            f"{row.first_call_s:.1f}",
            "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.1f}",
            "" if row.variant == EAGER else "equal" if row.psnr is None else f"{row.psnr:.1f}",
        ]
        for variants in by_workload(rows).values()
        for row in variants.values()
    ]


def compile_time_summary(rows: Sequence[Row]) -> list[str]:
    """Say for each variant how Inductor's time and the first call grow from the fewest blocks to the most."""
    grouped = list(by_workload(rows).items())
    if len(grouped) < 2:
        return []
    (fewest, few), (most, many) = grouped[0], grouped[-1]
    lines = []
    for variant, row in many.items():
        less = few.get(variant)
        if less is not None and row.inductor_s is not None and less.inductor_s:
            lines.append(
                f"{variant}: {row.inductor_s:.1f} s in Inductor for {most}, {row.inductor_s / less.inductor_s:.2f} times "
                f"that for {fewest}; first calls {row.first_call_s:.1f} and {less.first_call_s:.1f} s"
            )
    return lines


def outside_contract(rows: Iterable[Row]) -> list[str]:
    """Name every variant whose error against float64 exceeds what fidelity `close` allows."""
    found = []
    for workload, variants in by_workload(rows).items():
        eager = variants.get(EAGER)
        if eager is None or eager.error_f64 is None:
            continue
        for variant, row in variants.items():
            allowed = fidelity.allowance(eager.error_f64, DTYPES[eager.dtype])
            if row.error_f64 is not None and not row.error_f64 <= allowed:
                found.append(f"{workload}, {variant}: error {row.error_f64:.2e}, allowed {allowed:.2e}")
    return found


def _milliseconds(row: Row | None) -> str:
    return "-" if row is None else f"{row.median_ms:.2f} ms"


def _cell(row: Row | None, name: str, form: str) -> str:
    value: Any = None if row is None else getattr(row, name)
    return "-" if value is None else format(value, form)
