"""Suites: lists of tasks that are measured until time is up, and continued by the next run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tritium.bench.comparison import release, start_compiler
from tritium.bench.results import Row, Store
from tritium.bench.settings import Notify, Settings, part_of
from tritium.errors import brief


class OutOfTimeError(Exception):
    """The run's time is over in the middle of a task."""


@dataclass(frozen=True)
class Clock:
    """Seconds left of a limit that starts now. It is read between phases, and interrupts nothing."""

    seconds: float
    start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)

    def within(self, seconds: float) -> Clock:
        """Start a shorter limit that ends no later than this one."""
        return Clock(min(seconds, max(0.0, self.left)))


@dataclass(frozen=True)
class Task:
    name: str
    # On a GPU it starts only if at least this much time is left.
    seconds: float
    measure: Callable[[Clock, Notify], list[Row]]
    # False: measured only by name.
    default: bool = True


@dataclass(frozen=True)
class Outcome:
    """Workloads left to the next run, and the variants that failed."""

    left_over: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """A suite: its tasks, the model that its name takes on the command line, and lines that sum up its rows."""

    # What is registered on the stack is undone after the last task.
    tasks: Callable[[Settings, contextlib.ExitStack], Sequence[Task]]
    model: str | None = None
    summary: Callable[[Sequence[Row]], list[str]] = lambda _: []
    # Compiled code of one task is used by the next.
    keeps_code: bool = False

    def run(self, settings: Settings, store: Store, clock: Clock, notify: Notify, only: Sequence[str] = ()) -> Outcome:
        """Measure the named tasks again, or without names all that the store lacks; store the rows of each."""
        failed: list[str] = []
        with contextlib.ExitStack() as stack:
            known = self.tasks(settings, stack)
            missing = [task for task in known if task.default and not store.has(task.name, settings.dtype_text)]
            tasks = [task for task in known if task.name in only] if only else missing
            if tasks:
                start_compiler(settings)
            for index, task in enumerate(tasks):
                left_over = [later.name for later in tasks[index:]]
                if clock.left <= (task.seconds if settings.device_type == "cuda" else 0):
                    return Outcome(left_over, failed)
                try:
                    rows = task.measure(clock, part_of(notify, index, len(tasks)))
                    store.add(rows)
                    failed += failures(rows)
                except OutOfTimeError:
                    return Outcome(left_over, failed)
                except torch.AcceleratorError:
                    # After an error of the device itself nothing in this process can be trusted.
                    raise
                except Exception as error:  # noqa: BLE001 - the other tasks are measured all the same
                    failed.append(f"{task.name}: {brief(error)}")
                finally:
                    if not self.keeps_code:
                        release()
        return Outcome(failed=failed)


def failures(rows: Sequence[Row]) -> list[str]:
    """Name the variants that failed, which the remarks of the other variants tell."""
    remarks = [(row.workload, part) for row in rows for part in (row.remark or "").split("; ")]
    return list(dict.fromkeys(f"{workload}: {part}" for workload, part in remarks if " failed: " in part))
