"""Processes with a gloo group, for tests of parallel code: `ranks(2)(function, *arguments)`.

One group stays alive for a test module. Its processes are forked from a server that has imported torch, diffusers and
Tritium, and has one thread. Functions are at the top level of a test file; arguments and results are pickled.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

# Imported once by the server.
PRELOADED = [
    *("pytest", "torch._dynamo", "torch.distributed", "diffusers.pipelines.flux.pipeline_flux", "tritium.api"),
    "support.prepared",
]

# Seconds until a collective that other ranks do not join fails.
COLLECTIVE_TIMEOUT = 20

# Seconds that other ranks get to finish after one of them raised.
_GRACE = 10


class RankError(AssertionError):
    """An exception on a rank, with its traceback."""

    def __init__(self, rank: int, error: BaseException | None, trace: str) -> None:
        super().__init__(f"rank {rank}: {trace}")
        self.rank, self.error = rank, error


class Group:
    """Processes of one gloo group. A call runs a function on each and returns the results by rank."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.size, self._pipes, self._processes = size, [], []
        store = folder / f"store-{time.monotonic_ns()}"
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """Run a function on each rank; return the results by rank, or raise the first rank's exception.

        The exception is raised as it is, with the traceback of its rank as a note. Ranks that do not answer in time are
        killed, and print their stacks.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                if outcome.error is None:
                    raise outcome
                outcome.error.add_note(str(outcome))
                raise outcome.error
        return outcomes

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """Return the result of each rank, or the `RankError` that it raised."""
        assert "<locals>" not in function.__qualname__, "ranks run functions of a file's top level"
        job = pickle.dumps((inspect.getfile(inspect.unwrap(function)), function.__qualname__, arguments, timeout))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                outcomes[rank] = _received(pipe, rank)
                if isinstance(outcomes[rank], RankError):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if len(outcomes) < self.size:
            self.close()
            for rank in range(self.size):
                outcomes.setdefault(rank, RankError(rank, None, f"no answer within {timeout} s; the group is closed"))
        return [outcomes[rank] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


class Pool:
    """The groups of a test module, by size; a group that was closed is started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[int, Group] = {}

    def __call__(self, size: int) -> Group:
        group = self._groups.get(size)
        if group is None or not group.alive:
            if group is not None:
                group.close()
            group = self._groups[size] = Group(size, self._folder)
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def _received(pipe: Any, rank: int) -> Any:
    try:
        is_result, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return RankError(rank, None, "the process ended")
    return value if is_result else RankError(rank, *value)


def _serve(pipe: Any, rank: int, size: int, store: str) -> None:
    """Answer calls until the other end of the pipe is closed."""
    import torch
    from torch import distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    modules: dict[str, Any] = {}
    while True:
        try:
            file, name, arguments, limit = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            # Destroying the group may wait for ranks that were killed.
            os._exit(0)
        torch._dynamo.reset()
        torch.manual_seed(0)
        # Prints the stacks and ends the process, also if the parent is gone.
        faulthandler.dump_traceback_later(limit + 1, exit=True)
        try:
            if file not in modules:
                modules[file] = _loaded(file)
            outcome: Any = (True, getattr(modules[file], name)(*arguments))
        except BaseException as error:
            outcome = (False, (_picklable(error), traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(outcome))


def _loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None
