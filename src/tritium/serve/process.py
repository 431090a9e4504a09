"""A worker in other processes: one, or a group of ranks. The parent starts them, talks to the first, and watches all."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tritium.errors import PipelineError, TritiumError, brief
from tritium.serve.engine import Counts, Emit, IsCancelled, Job, Model, WorkerDied
from tritium.serve.worker_settings import WorkerSettings

# Seconds in which a process ends by itself after its pipe was closed.
_GRACE = 2.0


class ProcessWorker:
    """A worker in a process that is spawned, or in a group of `ranks` processes that compute each batch together."""

    def __init__(self, settings: WorkerSettings, ranks: int = 1, start_method: str = "spawn") -> None:
        self._settings, self._ranks = settings, ranks
        self._context: Any = multiprocessing.get_context(start_method)
        self._processes: list[Any] = []
        # One for each rank: a process ends when its pipe is closed. Only the first rank gets and sends messages.
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # Cancellations are sent by another thread than batches.
        self._sending = threading.Lock()
        self._counts = Counts()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def load(self) -> tuple[Model, ...]:
        """Start the processes; return when they are warm."""
        self._end()
        if self._closed:
            raise WorkerDied("it is closed")
        self._folder = tempfile.TemporaryDirectory(prefix="tritium-ranks-")
        for rank in range(self._ranks):
            ours, theirs = self._context.Pipe()
            given = (theirs, self._settings, rank, self._ranks, str(Path(self._folder.name) / "store"))
            process = self._context.Process(target=_main, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        kind, value = self._receive()
        if kind == "failed":
            self._end()
            raise PipelineError(value)
        models: tuple[Model, ...] = value
        return models

    def run(self, batch: Sequence[Job], emit: Emit, cancelled: IsCancelled) -> None:
        # Those that were cancelled before the batch was sent; later ones are sent by `cancel`.
        self._send(("run", list(batch), {job.id: why for job in batch if (why := cancelled(job.id)) is not None}))
        while True:
            kind, value = self._receive()
            if kind == "done":
                self._counts = value
                return
            emit(*value)

    def cancel(self, job_id: str, why: str) -> None:
        with contextlib.suppress(WorkerDied):
            self._send(("cancel", job_id, why))

    def counts(self) -> Counts:
        return self._counts

    def is_alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        self._closed = True
        self._end()

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._pipes[0].send(message)
        except (OSError, IndexError, ValueError) as error:
            raise WorkerDied("its process is gone") from error

    def _receive(self) -> Any:
        """Return the next message; raise `WorkerDied` if a process ends instead."""
        try:
            pipe = self._pipes[0]
            ready = connection.wait([pipe, *(process.sentinel for process in self._processes)])
            # Messages that were sent before the end come first.
            if pipe in ready or pipe.poll():
                return pipe.recv()
        except (EOFError, OSError, IndexError, ValueError) as error:
            raise WorkerDied(self._end()) from error
        raise WorkerDied(self._end())

    def _end(self) -> str:
        """End all processes; return how those ended that ended by themselves."""
        processes, pipes = self._processes, self._pipes
        self._processes, self._pipes = [], []
        ended = [(rank, process) for rank, process in enumerate(processes) if not process.is_alive()]
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in processes:
            process.join(_GRACE / max(1, self._ranks))
            if process.is_alive():
                process.kill()
                process.join()
        if self._folder is not None:
            self._folder.cleanup()
        return (
            ", ".join(f"rank {rank} ended with {_exit(process.exitcode)}" for rank, process in ended) or "it was ended"
        )


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _main(pipe: Any, settings: WorkerSettings, rank: int, count: int, store: str) -> None:
    """Load the worker and run batches until the pipe is closed; in a group, the other ranks follow the first one.

    The group meets through the file `store`.
    """
    # The parent ends its workers; Ctrl-C reaches all processes of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox = _Inbox(pipe)
    # tqdm would create a semaphore, which a process that is ended at once cannot release.
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    from tritium.serve import ranks
    from tritium.serve.worker import PipelineWorker

    worker: Any
    if count == 1:
        worker = PipelineWorker(settings)
    else:
        worker = ranks.join(settings, rank, count, store)
        if rank:
            worker.follow()
            return
    try:
        models = worker.load()
    except Exception as error:  # noqa: BLE001  # the parent raises it
        if not isinstance(error, TritiumError):
            traceback.print_exc()
        pipe.send(("failed", brief(error)))
        return
    pipe.send(("loaded", models))
    while True:
        batch = inbox.next()
        worker.run(batch, lambda job_id, event: pipe.send(("event", (job_id, event))), inbox.cancelled.get)
        pipe.send(("done", worker.counts()))
        inbox.forget(batch)


class _Inbox:
    """Messages of the parent, read by a thread while a batch runs."""

    def __init__(self, pipe: Any) -> None:
        self.cancelled: dict[str, str] = {}
        self._pipe = pipe
        self._batches: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="tritium-inbox", daemon=True).start()

    def next(self) -> list[Job]:
        return self._batches.get()

    def forget(self, batch: Sequence[Job]) -> None:
        for job in batch:
            self.cancelled.pop(job.id, None)

    def _read(self) -> None:
        while True:
            try:
                kind, *values = self._pipe.recv()
            except (EOFError, OSError):
                # The parent closed the pipe or is gone.
                end_process()
            if kind == "cancel":
                job_id, why = values
                self.cancelled[job_id] = why
            else:
                batch, reasons = values
                self.cancelled |= reasons
                self._batches.put(batch)


def end_process() -> None:
    """End this process at once: an orderly end waits for other ranks and for threads of the device."""
    os.kill(os.getpid(), signal.SIGKILL)
