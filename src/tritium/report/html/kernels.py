"""Rows for a report's kernels: time, bytes, operations, and the share of the device's limit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritium.report.observation import Kernel
from tritium.report.records import GraphRecord

if TYPE_CHECKING:
    from tritium.report import Report


@dataclass
class Row:
    """All launches of one kernel in one graph; `kernel` is the first."""

    graph: str
    kernel: Kernel
    # Launches in one run of the graph.
    launches: int
    # Microseconds of one launch; None if neither measured nor estimated.
    us: float | None
    # Time of all launches in one call; if nothing was measured, in one run of the graph.
    total_us: float | None
    # Mean bytes of a launch.
    moved: int
    # Bytes that the kernel's region moves divided by the bytes it must move.
    excess: float | None
    # The device's minimum time divided by the measured time, and the limit that applies: "memory" or "arithmetic".
    of_limit: float | None = None
    bound: str | None = None
    # Share of the time of all rows.
    share: float | None = None

    @property
    def intensity(self) -> float | None:
        return self.kernel.flops / self.moved if self.kernel.flops and self.moved else None

    @property
    def flops_per_s(self) -> float | None:
        return self.kernel.flops / self.us * 1e6 if self.kernel.flops and self.us else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.moved / self.us * 1e6 if self.us else None


class Kernels:
    """The rows of a report, longest time first, and the limits they are compared with."""

    def __init__(self, report: Report) -> None:
        roofs = report.measurement.roofs if report.measurement is not None else None
        self.measured = roofs is not None
        self.bandwidth = report.bandwidth
        self.flops_per_s = roofs.flops_per_s if roofs is not None else None
        self.dtype = roofs.dtype if roofs is not None else None
        self.rows = [row for record in report.records for row in self.rows_of(record)]
        self.rows.sort(key=lambda row: (-(row.total_us or 0.0), -row.moved))
        total = self.total_us
        for row in self.rows:
            row.share = row.total_us / total if total and row.total_us is not None else None

    @property
    def total_us(self) -> float:
        return sum(row.total_us or 0.0 for row in self.rows)

    def us_by(self, key: Callable[[Row], str]) -> dict[str, float]:
        """Return the total time of the rows with each key."""
        times: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            times[key(row)] += row.total_us or 0.0
        return dict(times)

    def rows_of(self, record: GraphRecord) -> list[Row]:
        excess = _excess(record.kernels)
        return [self._row(record, launches, excess) for launches in record.kernels_by_name().values()]

    def _row(self, record: GraphRecord, launches: Sequence[Kernel], excess: dict[int | None, float]) -> Row:
        first, count = launches[0], sum(kernel.count for kernel in launches)
        times = [kernel.measured_us if self.measured else kernel.estimated_us for kernel in launches]
        known = [time for time in times if time is not None]
        us = statistics.fmean(known) if known else None
        runs = (record.runs or 0.0) if self.measured else 1.0
        moved = statistics.fmean(kernel.bytes_moved for kernel in launches)
        limit, bound = self._limit(moved, first.flops)
        return Row(
            graph=record.graph,
            kernel=first,
            launches=count,
            us=us,
            total_us=us * count * runs if us is not None else None,
            moved=round(moved),
            excess=excess.get(first.region),
            of_limit=limit * 1e6 / us if self.measured and limit is not None and us else None,
            bound=bound,
        )

    def _limit(self, moved: float, flops: int | None) -> tuple[float | None, str | None]:
        """Return the seconds of the slower of the two roofs and its name, or None if a needed roof is unknown."""
        if self.bandwidth is None or (flops is not None and self.flops_per_s is None):
            return None, None
        memory = moved / self.bandwidth
        arithmetic = flops / self.flops_per_s if flops is not None and self.flops_per_s is not None else 0.0
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")


def _excess(kernels: Sequence[Kernel]) -> dict[int | None, float]:
    """Return by region the bytes moved, divided by the bytes that one kernel would move."""
    regions: defaultdict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.region is not None:
            regions[kernel.region].append(kernel)
    return {
        region: sum(kernel.bytes_moved for kernel in members) / members[-1].ideal_bytes
        for region, members in regions.items()
        if members[-1].ideal_bytes
    }
