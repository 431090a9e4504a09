"""Dispatch jobs to workers: an `Engine` over a `Runner`. Used by one event loop; nothing here blocks it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from tritium.serve.engine import (
    LAST,
    Cancelled,
    Done,
    Event,
    Failed,
    Job,
    Model,
    Preview,
    Refused,
    Runner,
    Started,
    Status,
    Step,
    WorkerDied,
)
from tritium.serve.queue import Entry, Limits, Queue

# How often a restarting worker is checked, and how often a queue looks for new slots and late jobs.
_RESTARTING = 0.05
_HEARTBEAT = 0.5
# Seconds after a drain in which cancelled batches may end.
_LAST_STEP = 5.0
_RETRY_BEFORE_START = 2.0


class Dispatcher:
    """Keep the queue, give batches to a runner, and merge the events of single images into those of their jobs."""

    def __init__(self, runner: Runner, limits: Limits | None = None) -> None:
        self._runner = runner
        self._limits = limits or Limits()
        self._queue = Queue((), self._limits, time.monotonic)
        self._tickets: dict[str, _Ticket] = {}
        self._batches: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._started = False
        self._draining = False
        self._stopped = False

    async def start(self) -> None:
        self._queue = Queue(await self._runner.start(), self._limits, time.monotonic)
        self._started = True

    def models(self) -> tuple[Model, ...]:
        return tuple(self._queue.models.values())

    def submit(self, job: Job) -> AsyncIterator[Event]:
        if self._draining:
            raise Refused("draining", "the server is shutting down: send the job to another one", _LAST_STEP)
        if not self._started:
            raise Refused("not_ready", "the model is still loading: see /readyz", _RETRY_BEFORE_START)
        queued = self._queue.admit(job, self._runner.slots)
        ticket = _Ticket(job=job, entered=time.monotonic())
        ticket.events.put_nowait(queued)
        if job.timeout is not None:
            ticket.timer = asyncio.get_running_loop().call_later(job.timeout, self.cancel, job.id, "deadline")
        self._tickets[job.id] = ticket
        self._pump()
        return self._events(ticket)

    async def _events(self, ticket: _Ticket) -> AsyncIterator[Event]:
        try:
            while True:
                event = await ticket.events.get()
                yield event
                if isinstance(event, LAST):
                    return
        finally:
            self.cancel(ticket.job.id, "disconnect")

    def cancel(self, job_id: str, why: str) -> bool:
        ticket = self._tickets.get(job_id)
        if ticket is None:
            return False
        self._end(ticket, Cancelled(why=why))
        self._pump()
        return True

    def status(self) -> Status:
        why = self._unready()
        return Status(
            ready=not why,
            why=why,
            queued=len(self._queue),
            queued_seconds=self._queue.seconds,
            running=self._queue.running,
            counts=self._runner.counts(),
        )

    def _unready(self) -> str:
        if self._draining:
            return "the server is shutting down"
        if not self._started:
            return "the model is loading and compiling"
        if not self._runner.ready():
            return "the worker restarts"
        return "the queue is full" if len(self._queue) >= self._limits.length else ""

    async def drain(self, seconds: float) -> None:
        self._draining = True
        until = time.monotonic() + seconds
        while self._tickets and time.monotonic() < until:
            await asyncio.sleep(min(0.05, seconds))
        for ticket in list(self._tickets.values()):
            self._end(ticket, Cancelled(why="shutdown"))
        if self._batches:
            await asyncio.wait(self._batches, timeout=_LAST_STEP)
        for task in list(self._batches):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if not self._stopped:
            self._stopped = True
            await self._runner.stop()

    def _end(self, ticket: _Ticket, event: Event) -> None:
        """Send a job its last event, and stop what is left of it."""
        self._tickets.pop(ticket.job.id, None)
        if ticket.timer is not None:
            ticket.timer.cancel()
        ticket.events.put_nowait(event)
        self._queue.remove(ticket.job.id)
        why = event.why if isinstance(event, Cancelled) else "failed"
        for single in ticket.running:
            self._runner.cancel(single, why)

    def _pump(self) -> None:
        """Start batches while there are slots, and come back when the queue says so."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in self._queue.late():
            if entry.parent.id in self._tickets:
                self._end(self._tickets[entry.parent.id], Cancelled(why="deadline"))
        delay = _HEARTBEAT
        while len(self._queue) and len(self._batches) < self._runner.slots:
            if not self._runner.ready():
                delay = _RESTARTING
                break
            batch = self._queue.take()
            if not batch:
                delay = self._queue.hold or 0.0
                break
            for entry in batch:
                self._tickets[entry.parent.id].running.add(entry.job.id)
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._batches.add(task)
        if len(self._queue):
            self._timer = asyncio.get_running_loop().call_later(delay, self._pump)

    async def _run(self, batch: list[Entry]) -> None:
        """Run a batch, deliver its events, and decide about its failures."""
        # A job may have been cancelled since its batch was chosen.
        run = _Run([entry for entry in batch if entry.parent.id in self._tickets])
        died = False
        try:
            if run.open:
                async for single, event in self._runner.run([entry.job for entry in run.open.values()]):
                    run.time(event)
                    self._deliver(run, single, event)
        except WorkerDied as error:
            died = True
            run.fail(Failed(code="worker_died", message=f"the worker ended: {error}", retry=True))
        except Exception as error:  # noqa: BLE001 - a runner's defect must not end the server
            run.fail(Failed(code="internal", message=f"the runner failed: {type(error).__name__}: {error}"))
        run.fail(Failed(code="internal", message="the worker ended the batch without a result"))
        self._queue.finish(batch, measured=0 < run.done == len(batch))
        self._batches.discard(_current_task())
        for entry, failure in run.failed:
            self._failed(entry, failure, run.size, died=died)
        self._pump()

    def _deliver(self, run: _Run, single: str, event: Event) -> None:
        entry = run.open.get(single)
        if entry is None:
            return
        ticket = self._tickets.get(entry.parent.id)
        if isinstance(event, LAST):
            del run.open[single]
            if ticket is not None:
                ticket.running.discard(single)
        if isinstance(event, Failed):
            run.failed.append((entry, event))
            return
        if isinstance(event, Done):
            run.done += 1
            event = replace(event, facts={**event.facts, "parts": run.parts()})
        if ticket is None:
            if isinstance(event, Started):
                # The first request to stop may have come before the worker had the job.
                self._runner.cancel(single, "cancelled before its start")
            return
        for merged in ticket.merge(entry, event, time.monotonic()):
            if isinstance(merged, LAST):
                self._end(ticket, merged)
            else:
                ticket.events.put_nowait(merged)

    def _failed(self, entry: Entry, failure: Failed, size: int, *, died: bool) -> None:
        """Run an image of a failed batch, or of a worker that died, once more alone; else fail its job."""
        ticket = self._tickets.get(entry.parent.id)
        if failure.code == "out_of_memory" and size > 1:
            self._queue.forbid(entry.job, size)
        if ticket is None:
            return
        ticket.running.discard(entry.job.id)
        if not entry.alone and (size > 1 or died):
            self._queue.again(entry)
            return
        # It ran alone and twice: a third time would end the same way.
        self._end(ticket, replace(failure, retry=failure.retry and not (died and entry.alone)))


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


class _Run:
    """What happened in one batch."""

    def __init__(self, batch: Sequence[Entry]) -> None:
        self.open = {entry.job.id: entry for entry in batch}
        self.size = len(batch)
        self.failed: list[tuple[Entry, Failed]] = []
        self.done = 0
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._steps = 0
        self._index = 0

    def time(self, event: Event) -> None:
        """Note when the first image to finish each step did so."""
        if isinstance(event, Step) and event.index > self._index:
            self._last = time.monotonic()
            self._index = event.index
            if self._first is None:
                self._first = self._last
            else:
                self._steps += 1

    def parts(self) -> dict[str, float]:
        """Return the seconds until the first step was done, of a later step, and after the last one."""
        if self._first is None:
            return {}
        step = {"step": (self._last - self._first) / self._steps} if self._steps else {}
        return {"start": self._first - self._began, **step, "end": time.monotonic() - self._last}

    def fail(self, failure: Failed) -> None:
        """Fail everything that has no last event."""
        self.failed += [(entry, failure) for entry in self.open.values()]
        self.open = {}


@dataclass(eq=False, kw_only=True)
class _Ticket:
    """A job between submission and its last event, with its results so far."""

    job: Job
    entered: float
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    # Ids of its images that are with the runner.
    running: set[str] = field(default_factory=set)
    began: float | None = None
    batched: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    previews: dict[int, int] = field(default_factory=dict)
    results: dict[int, Done] = field(default_factory=dict)

    def merge(self, entry: Entry, event: Event, now: float) -> list[Event]:
        """Return what an event of one image means for the job; nothing twice, also if the image runs again."""
        image = entry.job.seed - self.job.seed
        if isinstance(event, Started):
            return self._start(event, now)
        if isinstance(event, Step):
            if event.index <= self.steps.get(image, 0):
                return []
            self.steps[image] = event.index
            return [Step(index=sum(self.steps.values()), total=event.total * self.job.n)]
        if isinstance(event, Preview):
            if event.index < self.previews.get(image, 0):
                return []
            self.previews[image] = event.index + 1
            return [replace(event, image_index=image)]
        if isinstance(event, Done):
            self.results[image] = event
            return [self._done(now)] if len(self.results) == self.job.n else []
        return [event]

    def _start(self, event: Started, now: float) -> list[Event]:
        self.batched = max(self.batched, event.batched)
        if self.began is not None:
            return []
        self.began = now
        return [event]

    def _done(self, now: float) -> Done:
        results = [self.results[image] for image in sorted(self.results)]
        began = self.entered if self.began is None else self.began
        facts = {
            **results[0].facts,
            "batched": max(self.batched, 1),
            "seconds": now - began,
            "queue_seconds": began - self.entered,
        }
        return Done(images=tuple(image for result in results for image in result.images), facts=facts)
