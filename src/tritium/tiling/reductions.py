"""Choose how a reduction runs on a GPU: the row at once, in a loop, or cut into parts.

    persistent    a block holds the row in registers: every value is read once
    looped        a block loops over the row, once for every pass
    split         the row is cut into parts, which a second kernel combines
    cooperative   the row is cut into parts, which wait for each other inside one kernel

Inductor decides by the row's length and the number of rows. These rules decide by bytes and occupancy, and differ from
Inductor's only if the device's table has a measurement. They never change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritium.report.tiling import Form, ReductionChoice
from tritium.tuning.reductions import INDUCTOR_LIMITS, INDUCTOR_PERSISTENT, INDUCTOR_WHOLE, Limit, ReductionLimits

# Longer rows do not fit the registers of a block with 8 warps: 64 values for each of its 256 threads.
MOST_PERSISTENT = 16_384

# Blocks per multiprocessor for rows that Inductor does not cut, and the fewest values per block.
BLOCKS_PER_MULTIPROCESSOR = 4
LEAST_PART = 2_048


@dataclass(frozen=True)
class Reduction:
    """The known properties of a reduction of rows."""

    # Rows in the call that is compiled; None if unknown.
    rows: int | None
    # Values per row; None if it varies between calls.
    elements: int | None
    # Values loaded per position of a row, and bytes per row: if read once, and if read in every pass.
    reads: int = 1
    bytes_per_row: int = 0
    looped_bytes_per_row: int = 0
    # True if neighbours in a row are neighbours in memory.
    is_contiguous: bool = True
    multiprocessors: int | None = None


def walk(reduction: Reduction, inductor: Form, limits: ReductionLimits = INDUCTOR_LIMITS) -> ReductionChoice:
    """Choose whether a whole row is held in registers or looped over.

    >>> row = Reduction(rows=4096, elements=3072, reads=3, bytes_per_row=18432, looped_bytes_per_row=24576)
    >>> walk(row, "looped").form, walk(row, "looped", ReductionLimits(persistent_up_to=(Limit(3, 8192),))).form
    ('looped', 'persistent')
    """

    def taken(form: Form, reason: str) -> ReductionChoice:
        return ReductionChoice(form, inductor, reason, 1, reduction.rows, reduction.elements, reduction.reads)

    if reduction.elements is None:
        return taken(inductor, "the length of its rows is dynamic: Inductor's choice is kept")
    values = f"rows of {reduction.elements:,} elements, {reduction.reads} load{'' if reduction.reads == 1 else 's'}"
    if inductor == "persistent" or reduction.elements <= INDUCTOR_PERSISTENT or not reduction.is_contiguous:
        return taken(inductor, f"{values}: Inductor's choice is kept")
    limit = limits.limit(reduction.reads)
    if limit is None:
        return taken(inductor, f"{values}: above Inductor's limit of {INDUCTOR_PERSISTENT:,}, and nothing was measured")
    if reduction.elements > min(limit, MOST_PERSISTENT):
        return taken(inductor, f"{values}: above the measured limit of {min(limit, MOST_PERSISTENT):,}")
    if reduction.looped_bytes_per_row <= reduction.bytes_per_row:
        return taken(inductor, f"{values}: read once in either form")
    once, all_passes = _kib(reduction.bytes_per_row), _kib(reduction.looped_bytes_per_row)
    return taken("persistent", f"{values}: {once} are read once instead of {all_passes} in passes, measured faster")


def cut(reduction: Reduction, inductor_parts: int, limits: ReductionLimits = INDUCTOR_LIMITS) -> ReductionChoice:
    """Choose whether rows stay whole, are cut for a second kernel to combine, or cooperate.

    >>> row = Reduction(rows=128, elements=12288, multiprocessors=132)
    >>> cut(row, inductor_parts=2).form, cut(row, 2, ReductionLimits(whole_up_to=16384)).form
    ('split', 'looped')
    >>> cut(Reduction(rows=32, elements=1 << 20, multiprocessors=132), inductor_parts=17).form
    'split'
    """
    inductor: Form = "split" if inductor_parts > 1 else "looped"

    def taken(form: Form, reason: str, parts: int = 1) -> ReductionChoice:
        return ReductionChoice(form, inductor, reason, parts, reduction.rows, reduction.elements)

    rows, elements = reduction.rows, reduction.elements
    if rows is None or elements is None:
        return taken(inductor, "its sizes are not known: Inductor's choice is kept", inductor_parts)
    values = f"{rows:,} rows of {elements:,} elements"
    if elements <= limits.whole_up_to:
        if inductor == "looped":
            return taken("looped", f"{values}: not cut")
        return taken("looped", f"{values}: measured faster whole")
    # Parts that wait for each other must all run at the same time.
    together = (reduction.multiprocessors or 0) // 2
    if rows <= min(limits.cooperative_up_to_rows, together) and elements >= limits.cooperative_from:
        return taken("cooperative", f"{values}: measured faster in one kernel")
    if limits.split_below_rows is None:
        return taken(inductor, f"{values}: Inductor's choice is kept", inductor_parts)
    if rows >= limits.split_below_rows:
        return taken("looped", f"{values}: enough rows to keep the device busy")
    parts = inductor_parts if inductor == "split" else _parts(rows, elements, reduction.multiprocessors)
    return taken("split", f"{values}: too few rows to keep the device busy", parts)


def _parts(rows: int, elements: int, multiprocessors: int | None) -> int:
    wanted = math.ceil(BLOCKS_PER_MULTIPROCESSOR * (multiprocessors or 1) / max(rows, 1))
    return max(min(wanted, elements // LEAST_PART), 2)


def _kib(size: int) -> str:
    """Format bytes as KiB.

    >>> _kib(18432)
    '18 KiB'
    """
    return f"{size / 1024:,.0f} KiB"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one function in several forms."""

    rows: int
    elements: int
    reads: int
    ms: Mapping[str, float]


# A form must be this much faster to be chosen, and may be this much slower for rows before a longer one.
GAIN = 0.02
TIE = 0.01


def limits_of(timings: Sequence[Timing], versions: Mapping[str, str]) -> ReductionLimits:
    """Return the limits of a device that follow from its timings.

    >>> timing = Timing(4096, 1536, 2, {"looped": 1.0, "persistent": 0.9})
    >>> limits_of([timing, Timing(4096, 2048, 2, {"looped": 1.0})], {}).persistent_up_to
    (Limit(reads=2, elements=1536),)
    """
    limits = []
    for reads in sorted({timing.reads for timing in timings if "persistent" in timing.ms}):
        longest = _longest([timing for timing in timings if timing.reads == reads], "persistent", "looped")
        limits.append(Limit(reads, longest or INDUCTOR_PERSISTENT))
    whole_up_to = INDUCTOR_WHOLE
    cut_rows = [timing for timing in timings if {"split", "looped"} <= timing.ms.keys()]
    if cut_rows:
        whole_up_to = _longest(cut_rows, "looped", "split") or INDUCTOR_WHOLE
    together = [timing for timing in timings if {"split", "cooperative"} <= timing.ms.keys()]
    cooperative_up_to_rows = cooperative_from = 0
    # Start with the longest rows; stop when cooperating is not faster.
    for timing in sorted(together, key=lambda timing: -timing.elements):
        rival = min(ms for form, ms in timing.ms.items() if form != "cooperative")
        if timing.ms["cooperative"] > (1 - GAIN) * rival:
            break
        cooperative_up_to_rows, cooperative_from = timing.rows, timing.elements
    return ReductionLimits(
        persistent_up_to=tuple(limits),
        whole_up_to=whole_up_to,
        cooperative_up_to_rows=cooperative_up_to_rows,
        cooperative_from=cooperative_from,
        versions=versions,
    )


def _longest(timings: Sequence[Timing], form: str, other: str) -> int | None:
    """Return the longest row for which a form is faster, if it is not slower for any shorter one."""
    longest = None
    for timing in sorted(timings, key=lambda timing: timing.elements):
        if not {form, other} <= timing.ms.keys():
            continue
        ratio = timing.ms[form] / timing.ms[other]
        if ratio > 1 + TIE:
            break
        if ratio < 1 - GAIN:
            longest = timing.elements
    return longest
