"""One process of a user at a time measures on a GPU: others wait for their turn.

Compiling leaves a GPU idle, so benches of several workloads run well side by side, as long as their timings do not meet.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(device_type: str) -> Iterator[None]:
    """Hold the device's turn; nothing is held for a CPU, nor where files cannot be locked."""
    if device_type != "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path = Path(tempfile.gettempdir()) / f"tritium-{os.getuid()}-{device_type}.turn"
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
