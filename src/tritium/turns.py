"""A lock per GPU: only one process of this user, and one of its threads, times at once.

Compiling leaves a GPU idle, so benchmarks of several workloads can run in parallel as long as their timings do not
overlap. Code that needs another lock as well must take this one first.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

# Seconds to wait before measuring anyway: an overlapping timing is only less exact, and a process stopped while it
# holds the lock must not block others forever.
PATIENCE = 300.0

_POLL = 0.02

_PROCESS = threading.Lock()
_OWN = threading.local()

T = TypeVar("T")


@contextlib.contextmanager
def turn(device_type: str) -> Iterator[None]:
    """Hold the device's lock; reentrant. Nothing is locked for a CPU or where files cannot be locked."""
    if device_type != "cuda" or held():
        yield
        return
    deadline = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        if _PROCESS.acquire(timeout=PATIENCE):
            stack.callback(_PROCESS.release)
            _wait_for_processes(stack, device_type, deadline)
        else:
            _give_up("another thread")
        stack.enter_context(_holding())
        yield


def held() -> bool:
    """Return True if this thread holds the lock."""
    return getattr(_OWN, "held", False)


def lent(work: Callable[[], T]) -> Callable[[], T]:
    """Wrap `work` for another thread that this one waits for: it holds the lock if this thread does now."""
    if not held():
        return work

    def run() -> T:
        with _holding():
            return work()

    return run


@contextlib.contextmanager
def _holding() -> Iterator[None]:
    _OWN.held = True
    try:
        yield
    finally:
        _OWN.held = False


def _wait_for_processes(stack: contextlib.ExitStack, device_type: str, deadline: float) -> None:
    try:
        import fcntl

        path = Path(tempfile.gettempdir()) / f"tritium-{os.getuid()}-{device_type}.turn"
        file: IO[str] = stack.enter_context(path.open("a"))
    except (ImportError, OSError):
        return
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                _give_up("another process")
                return
            time.sleep(_POLL)
        except OSError:
            # The file system does not support locks.
            return
        else:
            return


def _give_up(who: str) -> None:
    warnings.warn(
        f"tritium: {who} has measured on the GPU for {PATIENCE:.0f} s; not waiting any longer, so timings may be disturbed",
        RuntimeWarning,
        stacklevel=4,
    )
