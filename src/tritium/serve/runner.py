"""The runner of one machine: each worker has a thread, and a worker may be a proxy of another process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tritium.serve.engine import Counts, Event, Job, Model, Worker, WorkerDied

# A worker that cannot be loaded so many times in a row stays away.
_ATTEMPTS = 5
# Seconds before the second attempt; twice as long before each further one.
_BACKOFF = 1.0
# How often an idle worker is checked.
_CHECK_SECONDS = 0.25
# Seconds in which a worker's thread ends, after its worker was closed.
_STOP_SECONDS = 10.0


class LocalRunner:
    """Carry batches to workers, each in a thread; a worker that dies is loaded again."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._cancelled: dict[str, str] = {}
        self._lanes = [_Lane(worker, self._cancelled) for worker in workers]
        self._idle: asyncio.Queue[_Lane] = asyncio.Queue()
        self._running: dict[str, _Lane] = {}

    @property
    def slots(self) -> int:
        """The number of workers that are loaded, at least 1: their number while all of them start again."""
        return max(1, sum(lane.is_ready for lane in self._lanes))

    async def start(self) -> tuple[Model, ...]:
        """Load all workers at the same time; raise the error of one that cannot be loaded."""
        loop = asyncio.get_running_loop()
        for lane in self._lanes:
            lane.start(loop, self._idle)
        try:
            models = [await lane.loaded for lane in self._lanes]
        except BaseException:
            await self.stop()
            raise
        return models[0]

    async def run(self, batch: Sequence[Job]) -> AsyncIterator[tuple[str, Event]]:
        lane = await self._idle.get()
        task = _Batch(batch, asyncio.get_running_loop())
        for job in batch:
            self._running[job.id] = lane
        lane.tasks.put(task)
        try:
            while True:
                item = await task.events.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not task.is_over:
                for job in batch:
                    self.cancel(job.id, "disconnect")
            for job in batch:
                self._running.pop(job.id, None)
                if task.is_over:
                    self._cancelled.pop(job.id, None)

    def cancel(self, job_id: str, why: str) -> None:
        lane = self._running.get(job_id)
        if lane is not None:
            self._cancelled[job_id] = why
            lane.worker.cancel(job_id, why)

    def ready(self) -> bool:
        return any(lane.is_ready and lane.worker.is_alive() for lane in self._lanes)

    def counts(self) -> Counts:
        """Return the totals of all workers; of those that started again, also what they had counted before."""
        return sum((lane.counts for lane in self._lanes), Counts())

    async def stop(self) -> None:
        for job_id in list(self._running):
            self.cancel(job_id, "shutdown")
        for lane in self._lanes:
            lane.stop()
        await asyncio.gather(*(asyncio.to_thread(lane.join) for lane in self._lanes))


class _Batch:
    """Jobs for a worker's thread, and the way back of their events to the event loop."""

    def __init__(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = jobs
        # A pair, the error that ended the batch, or None at its end.
        self.events: asyncio.Queue[tuple[str, Event] | BaseException | None] = asyncio.Queue()
        self.is_over = False
        self._loop = loop

    def emit(self, job_id: str, event: Event) -> None:
        _call(self._loop, self.events.put_nowait, (job_id, event))

    def end(self, error: BaseException | None = None) -> None:
        self.is_over = True
        _call(self._loop, self.events.put_nowait, error)


class _Lane:
    """One worker and its thread."""

    def __init__(self, worker: Worker, cancelled: dict[str, str]) -> None:
        self.worker = worker
        self.tasks: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self.counts = Counts()
        self.is_ready = False
        self._cancelled = cancelled
        self._before = Counts()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tritium-worker", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, idle: asyncio.Queue[_Lane]) -> None:
        self._loop, self._idle = loop, idle
        self.loaded: asyncio.Future[tuple[Model, ...]] = loop.create_future()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.is_ready = False
        self.tasks.put(None)
        # `start` may wait for it still.
        self.loaded.cancel()

    def join(self) -> None:
        """Close the worker and wait for the thread; a step that takes longer is left to its daemon thread."""
        self.worker.close()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            models = self.worker.load()
        except BaseException as error:  # noqa: BLE001  # the event loop raises it
            _call(self._loop, self._settle, error)
            return
        self._count()
        self.is_ready = True
        _call(self._loop, self._idle.put_nowait, self)
        _call(self._loop, self._settle, models)
        while not self._stopped.is_set():
            try:
                task = self.tasks.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                if not self.worker.is_alive():
                    self._restart()
                continue
            if task is not None:
                self._run(task)

    def _settle(self, outcome: tuple[Model, ...] | BaseException) -> None:
        if self.loaded.done():
            return
        if isinstance(outcome, BaseException):
            self.loaded.set_exception(outcome)
        else:
            self.loaded.set_result(outcome)

    def _run(self, task: _Batch) -> None:
        if not self.worker.is_alive() and not self._stopped.is_set():
            self._restart()
        if not self.is_ready:
            task.end(WorkerDied("it could not be started again"))
            _call(self._loop, self._idle.put_nowait, self)
            return
        error: BaseException | None = None
        try:
            self.worker.run(task.jobs, task.emit, self._cancelled.get)
            self._count()
        except BaseException as raised:  # noqa: BLE001  # the event loop raises it
            error = raised
        if isinstance(error, WorkerDied) and not self._stopped.is_set():
            self.is_ready = False
            task.end(error)
            self._restart()
        else:
            task.end(error)
        _call(self._loop, self._idle.put_nowait, self)

    def _restart(self) -> None:
        """Load the worker again, several times if necessary."""
        self.is_ready = False
        self._before = replace(self.counts, restarts=self._before.restarts + 1, device_bytes=0, captures=0)
        self.counts = self._before
        for attempt in range(_ATTEMPTS):
            if attempt and self._stopped.wait(_BACKOFF * 2 ** (attempt - 1)):
                return
            with contextlib.suppress(Exception):
                self.worker.load()
                self._count()
                self.is_ready = not self._stopped.is_set()
                return

    def _count(self) -> None:
        self.counts = self._before + self.worker.counts()


def _call(loop: asyncio.AbstractEventLoop, function: object, *arguments: object) -> None:
    """Call a function in an event loop; do nothing if the loop is closed, as at the end of a server."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]
