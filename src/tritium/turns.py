"""One at a time measures on a GPU: other processes of the user, and other threads of this one, wait for their turn.

Compiling leaves a GPU idle, so benches of several workloads run well side by side, as long as their timings do not meet.
Whoever needs a lock besides takes the turn first and the lock after it.
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

# Seconds after which one measures all the same: a timing that met another is a worse timing, and a process that was
# stopped in the middle of its turn is no reason to wait for ever.
PATIENCE = 300.0

_POLL = 0.02

_PROCESS = threading.Lock()
_OWN = threading.local()

T = TypeVar("T")


@contextlib.contextmanager
def turn(device_type: str) -> Iterator[None]:
    """Hold the device's turn; who has it already goes on. Nothing is held for a CPU, nor where files cannot be locked."""
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
    """Whether this thread has the turn."""
    return getattr(_OWN, "held", False)


def lent(work: Callable[[], T]) -> Callable[[], T]:
    """`work` for another thread that this one waits for: it has the turn if this one has it now."""
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
            # A file system without locks.
            return
        else:
            return


def _give_up(who: str) -> None:
    warnings.warn(
        f"tritium: {who} has measured on the GPU for {PATIENCE:.0f} s; not waiting any longer, so timings may be disturbed",
        RuntimeWarning,
        stacklevel=4,
    )
