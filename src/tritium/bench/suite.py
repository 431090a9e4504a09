"""Suites: lists of tasks that are measured until time is up, and continued by the next run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tritium.bench.results import Row
from tritium.bench.settings import Notify, Settings, part_of
from tritium.bench.store import Clock, Store
from tritium.bench.variants import start_compiler


class OutOfTimeError(Exception):
    """The run's time is over in the middle of a task."""


@dataclass(frozen=True)
class Measured:
    """The rows of a task, and its variants that failed."""

    rows: list[Row]
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """One workload of a suite. On a GPU it starts only if at least `seconds` are left."""

    name: str
    seconds: float
    measure: Callable[[Clock, Notify], Measured]


@dataclass(frozen=True)
class Outcome:
    """Workloads left to the next run, and the variants that failed."""

    left_over: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def missing(tasks: Sequence[Task], settings: Settings, store: Store) -> list[Task]:
    """Return the tasks that the store has no rows of."""
    return [task for task in tasks if not store.has(task.name, settings.dtype_text)]


def measure_all(tasks: Sequence[Task], settings: Settings, store: Store, clock: Clock, notify: Notify) -> Outcome:
    """Measure tasks and store the rows of each as soon as they are known, until the clock is at its end."""
    failed: list[str] = []
    if tasks:
        start_compiler(settings)
    for index, task in enumerate(tasks):
        left_over = [later.name for later in tasks[index:]]
        if clock.left <= (task.seconds if settings.device_type == "cuda" else 0):
            return Outcome(left_over, failed)
        try:
            measured = task.measure(clock, part_of(notify, index, len(tasks)))
        except OutOfTimeError:
            return Outcome(left_over, failed)
        store.add(measured.rows)
        failed += [f"{task.name}: {reason}" for reason in measured.failed]
    return Outcome(failed=failed)
