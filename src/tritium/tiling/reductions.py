"""Choose how a reduction runs on a GPU: the row at once, in a loop, or cut into parts.

    persistent    a block holds the row in registers: every value is read once
    looped        a block loops over the row, once for every pass
    split         the row is cut into parts, which a second kernel combines

Inductor decides by the row's length and the number of rows. These rules decide by bytes and occupancy, and differ from
Inductor's only if the device's table has a measurement. They never change the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from tritium.report.observation import Form, ReductionChoice
from tritium.tuning.tables import INDUCTOR_LIMITS, INDUCTOR_PERSISTENT, ReductionLimits

# Longer rows do not fit the registers of a block with 8 warps: 64 values for each of its 256 threads.
MOST_PERSISTENT = 16_384


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


def walk(reduction: Reduction, inductor: Form, limits: ReductionLimits = INDUCTOR_LIMITS) -> ReductionChoice:
    """Choose whether a whole row is held in registers or looped over.

    >>> from tritium.tuning import Limit
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
    once, all_passes = (f"{size / 1024:,.0f} KiB" for size in (reduction.bytes_per_row, reduction.looped_bytes_per_row))
    return taken("persistent", f"{values}: {once} are read once instead of {all_passes} in passes, measured faster")


def cut(rows: int, elements: int, inductor_parts: int, limits: ReductionLimits = INDUCTOR_LIMITS) -> ReductionChoice:
    """Choose whether rows stay whole, or are cut into Inductor's parts for a second kernel to combine.

    >>> cut(128, 12288, 2).form, cut(128, 12288, 2, ReductionLimits(whole_up_to=16384)).form
    ('split', 'looped')
    """
    inductor: Form = "split" if inductor_parts > 1 else "looped"
    values = f"{rows:,} rows of {elements:,} elements"
    if inductor == "split" and elements <= limits.whole_up_to:
        return ReductionChoice("looped", inductor, f"{values}: measured faster whole", 1, rows, elements)
    reason = f"{values}: Inductor's choice is kept"
    return ReductionChoice(inductor, inductor, reason, inductor_parts, rows, elements)
