"""Python's garbage collector while something is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def new_alone() -> Iterator[None]:
    """Let the collector look at new objects only.

    Tracing a model makes enough objects to set off a full collection, which walks through every module, function and
    weight of the process: 0.3 to 0.4 of the 6 seconds of a start with artifacts. What is garbage by now is found after it.
    """
    # Somebody else's frozen objects would be thawed with ours.
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
