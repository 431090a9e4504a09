"""Rows that survive an interrupted run, and limits of time that are checked between phases."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritium.bench.results import Results, Row


class Store:
    """The rows of a run, written to a file after every workload.

    To `resume`, rows already in the file stay if they were measured on the same device with the same versions; otherwise
    the file is replaced, and `replaced` says why.
    """

    def __init__(self, path: Path | None, device_type: str, *, resume: bool = True) -> None:
        self.path = path
        self.device_type = device_type
        self.replaced = ""
        self._rows: dict[tuple[str, str], list[Row]] = {}
        if path is None or not resume or not path.exists() or not path.stat().st_size:
            return
        stored, now = Results.load(path), Results.now([], device_type)
        for part in ("device", "versions"):
            # Through JSON, where a tuple is a list.
            was, wanted = getattr(stored, part), json.loads(json.dumps(getattr(now, part)))
            if was != wanted:
                self.replaced = f"{path} has other {part} ({was}), so all of it is measured again"
                return
        for row in stored.rows:
            self._rows.setdefault((row.workload, row.dtype), []).append(row)

    def has(self, workload: str, dtype: str) -> bool:
        return (workload, dtype) in self._rows

    def add(self, rows: Sequence[Row]) -> None:
        """Replace the rows of some workloads and write the file."""
        for key in dict.fromkeys((row.workload, row.dtype) for row in rows):
            self._rows[key] = [row for row in rows if (row.workload, row.dtype) == key]
        if self.path is not None and rows:
            self.results.save(self.path)

    @property
    def results(self) -> Results:
        return Results.now([row for rows in self._rows.values() for row in rows], self.device_type)


@dataclass(frozen=True)
class Clock:
    """Seconds left of a limit that starts now."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)

    def within(self, seconds: float) -> Clock:
        """Start a shorter limit that ends no later than this one."""
        return Clock(min(seconds, max(0.0, self.left)))
