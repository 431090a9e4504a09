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
from dataclasses import dataclass, replace
from typing import Any, Literal

Form = Literal["persistent", "looped", "split", "cooperative"]

# Inductor's limits: the longest persistent row, and the longest row that it never cuts.
INDUCTOR_PERSISTENT = 1024
INDUCTOR_WHOLE = 8192
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


@dataclass(frozen=True)
class Limit:
    """Rows of up to `elements` elements are persistent in kernels with at most `reads` loads per position."""

    reads: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """The measurements on a device. An omitted field leaves the choice to the rules.

    >>> Table.from_dict({"persistent_up_to": [{"reads": 3, "elements": 8192}]}).limit(2)
    8192
    """

    # Replaces Inductor's 1,024.
    persistent_up_to: tuple[Limit, ...] = ()
    # Rows of up to this many elements are not cut, even if there are few.
    whole_up_to: int = INDUCTOR_WHOLE
    # Longer rows are cut if there are fewer than this; None: twice the multiprocessors, as in Inductor.
    split_below_rows: int | None = None
    # Up to this many rows of at least this many elements are cut inside one kernel, instead of in two.
    cooperative_up_to_rows: int = 0
    cooperative_from: int = 0
    # The torch version of the measured code.
    torch: str = ""

    def limit(self, reads: int) -> int | None:
        """Return the longest persistent row of a kernel with `reads` loads; None if it was not measured."""
        fitting = [limit for limit in self.persistent_up_to if limit.reads >= reads]
        return min(fitting, key=lambda limit: limit.reads).elements if fitting else None

    @classmethod
    def from_dict(cls, entry: Any) -> Table:
        """Return the table of a file's entry; raise TypeError if it has other fields or types."""
        if not isinstance(entry, Mapping) or not isinstance(entry.get("persistent_up_to", []), (list, tuple)):
            raise TypeError("an entry is an object, and its limits are a list")
        limits = tuple(Limit(**limit) for limit in entry.get("persistent_up_to", ()))
        table = cls(**{**entry, "persistent_up_to": limits})
        numbers = [number for limit in limits for number in (limit.reads, limit.elements)]
        numbers += [
            table.whole_up_to,
            table.cooperative_up_to_rows,
            table.cooperative_from,
            table.split_below_rows or 0,
        ]
        if not all(type(number) is int for number in numbers) or not isinstance(table.torch, str):
            raise TypeError("limits are integers, and torch is a string")
        return table


DEFAULT = Table()


@dataclass(frozen=True)
class Choice:
    """A form, the reason, and the form that Inductor would choose."""

    form: Form
    inductor: Form
    reason: str
    # The number of parts of each row; 1 for uncut rows. A cooperative kernel determines it at launch.
    parts: int = 1
    rows: int | None = None
    elements: int | None = None
    reads: int | None = None

    @property
    def differs(self) -> bool:
        return self.form != self.inductor

    def after(self, before: Choice) -> Choice:
        """Combine this choice with the one made at lowering, when rows were cut or left whole."""
        reason = f"{before.reason}; {self.reason}"
        form = "split" if before.form == "split" else self.form
        return replace(self, form=form, inductor=before.inductor, parts=before.parts, reason=reason)


def walk(reduction: Reduction, inductor: Form, table: Table = DEFAULT) -> Choice:
    """Choose whether a whole row is held in registers or looped over.

    >>> row = Reduction(rows=4096, elements=3072, reads=3, bytes_per_row=18432, looped_bytes_per_row=24576)
    >>> walk(row, "looped").form, walk(row, "looped", Table(persistent_up_to=(Limit(3, 8192),))).form
    ('looped', 'persistent')
    """

    def taken(form: Form, reason: str) -> Choice:
        return Choice(form, inductor, reason, 1, reduction.rows, reduction.elements, reduction.reads)

    if reduction.elements is None:
        return taken(inductor, "the length of its rows is dynamic: Inductor's choice is kept")
    values = f"rows of {reduction.elements:,} elements, {reduction.reads} load{'' if reduction.reads == 1 else 's'}"
    if inductor == "persistent" or reduction.elements <= INDUCTOR_PERSISTENT or not reduction.is_contiguous:
        return taken(inductor, f"{values}: Inductor's choice is kept")
    limit = table.limit(reduction.reads)
    if limit is None:
        return taken(inductor, f"{values}: above Inductor's limit of {INDUCTOR_PERSISTENT:,}, and nothing was measured")
    if reduction.elements > min(limit, MOST_PERSISTENT):
        return taken(inductor, f"{values}: above the measured limit of {min(limit, MOST_PERSISTENT):,}")
    if reduction.looped_bytes_per_row <= reduction.bytes_per_row:
        return taken(inductor, f"{values}: read once in either form")
    once, all_passes = _kib(reduction.bytes_per_row), _kib(reduction.looped_bytes_per_row)
    return taken("persistent", f"{values}: {once} are read once instead of {all_passes} in passes, measured faster")


def cut(reduction: Reduction, inductor_parts: int, table: Table = DEFAULT) -> Choice:
    """Choose whether rows stay whole, are cut for a second kernel to combine, or cooperate.

    >>> row = Reduction(rows=128, elements=12288, multiprocessors=132)
    >>> cut(row, inductor_parts=2).form, cut(row, 2, Table(whole_up_to=16384)).form
    ('split', 'looped')
    >>> cut(Reduction(rows=32, elements=1 << 20, multiprocessors=132), inductor_parts=17).form
    'split'
    """
    inductor: Form = "split" if inductor_parts > 1 else "looped"

    def taken(form: Form, reason: str, parts: int = 1) -> Choice:
        return Choice(form, inductor, reason, parts, reduction.rows, reduction.elements)

    rows, elements = reduction.rows, reduction.elements
    if rows is None or elements is None:
        return taken(inductor, "its sizes are not known: Inductor's choice is kept", inductor_parts)
    values = f"{rows:,} rows of {elements:,} elements"
    if elements <= table.whole_up_to:
        if inductor == "looped":
            return taken("looped", f"{values}: not cut")
        return taken("looped", f"{values}: measured faster whole")
    # Parts that wait for each other must all run at the same time.
    together = (reduction.multiprocessors or 0) // 2
    if rows <= min(table.cooperative_up_to_rows, together) and elements >= table.cooperative_from:
        return taken("cooperative", f"{values}: measured faster in one kernel")
    if table.split_below_rows is None:
        return taken(inductor, f"{values}: Inductor's choice is kept", inductor_parts)
    if rows >= table.split_below_rows:
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


def table_of(timings: Sequence[Timing], torch: str) -> dict[str, Any]:
    """Build the table entry of a device from its timings alone.

    >>> table_of([Timing(4096, 1536, 2, {"looped": 1.0, "persistent": 0.9}), Timing(4096, 2048, 2, {"looped": 1.0})], "2.11")
    {'torch': '2.11', 'persistent_up_to': [{'reads': 2, 'elements': 1536}]}
    """
    entry: dict[str, Any] = {"torch": torch}
    limits = []
    for reads in sorted({timing.reads for timing in timings if "persistent" in timing.ms}):
        longest = _longest([timing for timing in timings if timing.reads == reads], "persistent", "looped")
        limits.append({"reads": reads, "elements": longest or INDUCTOR_PERSISTENT})
    if limits:
        entry["persistent_up_to"] = limits
    cut_rows = [timing for timing in timings if {"split", "looped"} <= timing.ms.keys()]
    if cut_rows:
        entry["whole_up_to"] = _longest(cut_rows, "looped", "split") or INDUCTOR_WHOLE
    together = [timing for timing in timings if {"split", "cooperative"} <= timing.ms.keys()]
    # Start with the longest rows; stop when cooperating is not faster.
    for timing in sorted(together, key=lambda timing: -timing.elements):
        rival = min(ms for form, ms in timing.ms.items() if form != "cooperative")
        if timing.ms["cooperative"] > (1 - GAIN) * rival:
            break
        entry["cooperative_up_to_rows"], entry["cooperative_from"] = timing.rows, timing.elements
    return entry


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
