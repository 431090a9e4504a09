"""Rows for a report's kernels: time, bytes, operations, and the share of the device's limit."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """All launches of one kernel in one graph."""

    graph: str
    name: str
    kind: str
    # Launches in one run of the graph.
    launches: int
    # Microseconds of one launch; None if neither measured nor estimated.
    us: float | None
    # Time of all launches in one call (if nothing was measured: in one run of the graph), and its share of all rows.
    total_us: float | None
    share: float | None
    moved: int
    # Bytes that the kernel's region moves divided by the bytes it must move.
    excess: float | None
    ideal: int | None
    flops: int | None
    # The device's minimum time divided by the measured time; None if either is unknown.
    of_limit: float | None
    # The limit that applies: "memory" or "arithmetic".
    bound: str | None
    ops: Sequence[str]
    source_lines: Sequence[str]
    why_not_fused: Sequence[str]

    @property
    def intensity(self) -> float | None:
        return self.flops / self.moved if self.flops and self.moved else None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.us * 1e6 if self.flops and self.us else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.moved / self.us * 1e6 if self.us else None


@dataclass(frozen=True)
class Kernels:
    """The rows, longest time first, and the limits they are compared with."""

    rows: list[Row]
    measured: bool
    bandwidth: float | None
    flops_per_s: float | None
    dtype: str | None

    @property
    def total_us(self) -> float:
        return sum(row.total_us or 0.0 for row in self.rows)

    @property
    def launches(self) -> int:
        return sum(row.launches for row in self.rows)

    def us_by(self, name: str) -> dict[str, float]:
        """Return the total time by the value of one field."""
        found: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            found[getattr(row, name)] += row.total_us or 0.0
        return dict(found)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Kernels:
        measurement = data["measurement"]
        roofs = measurement["roofs"] if measurement is not None else None
        bandwidth = data["bandwidth"]
        peak = roofs["flops_per_s"] if roofs is not None else None
        runs = {graph["graph"]: graph["runs"] for graph in data["graphs"]}
        excess = _excess(data["kernels"])
        groups: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for kernel in data["kernels"]:
            groups[kernel["graph"], kernel["name"]].append(kernel)
        rows = []
        for (graph, _), launches in groups.items():
            times = runs[graph] if measurement is not None else 1.0
            rows.append(_row(launches, times or 0.0, excess, bandwidth, peak, measured=measurement is not None))
        total = sum(row.total_us or 0.0 for row in rows)
        rows = [_with_share(row, total) for row in rows]
        rows.sort(key=lambda row: (-(row.total_us or 0.0), -row.moved))
        return cls(rows, measurement is not None, bandwidth, peak, roofs["dtype"] if roofs is not None else None)


def _excess(kernels: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Return by graph and region the bytes moved, divided by the bytes that one kernel would move."""
    moved: Counter[tuple[str, int]] = Counter()
    ideal: dict[tuple[str, int], int] = {}
    for kernel in kernels:
        if (region := kernel.get("region")) is not None:
            moved[kernel["graph"], region] += _moved(kernel)
            ideal[kernel["graph"], region] = kernel["ideal_bytes"]
    return {place: total / ideal[place] for place, total in moved.items() if ideal[place]}


def _moved(kernel: Mapping[str, Any]) -> int:
    return int(kernel["bytes_read"] + kernel["bytes_written"])


def _row(
    launches: Sequence[Mapping[str, Any]],
    runs: float,
    excess: Mapping[tuple[str, int], float],
    bandwidth: float | None,
    peak: float | None,
    *,
    measured: bool,
) -> Row:
    first = launches[0]
    which = "measured_us" if measured else "estimated_us"
    count = sum(kernel["count"] for kernel in launches)
    known = [kernel[which] for kernel in launches if kernel[which] is not None]
    us = statistics.fmean(known) if known else None
    moved, flops = statistics.fmean(map(_moved, launches)), first.get("flops")
    region = first.get("region")
    limit = _limit(moved, flops, bandwidth, peak)
    return Row(
        graph=first["graph"],
        name=first["name"],
        kind=first.get("kind", "generated"),
        launches=count,
        us=us,
        total_us=us * count * runs if us is not None else None,
        share=None,
        moved=round(moved),
        excess=excess.get((first["graph"], region)) if region is not None else None,
        ideal=first["ideal_bytes"],
        flops=flops,
        of_limit=limit[0] * 1e6 / us if measured and limit is not None and us else None,
        bound=limit[1] if limit is not None else None,
        ops=first["ops"],
        source_lines=first["source_lines"],
        why_not_fused=first["why_not_fused"],
    )


def _limit(moved: float, flops: int | None, bandwidth: float | None, peak: float | None) -> tuple[float, str] | None:
    """Return the seconds of the slower of the two roofs and its name, or None if a needed roof is unknown."""
    if bandwidth is None or (flops is not None and peak is None):
        return None
    memory = moved / bandwidth
    arithmetic = flops / peak if flops is not None and peak is not None else 0.0
    return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")


def _with_share(row: Row, total: float) -> Row:
    return dataclasses.replace(row, share=row.total_us / total) if row.total_us is not None and total else row
