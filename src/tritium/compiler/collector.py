"""Python's cyclic garbage collector, held back while something is compiled.

Importing and running a compiler makes hundreds of thousands of objects that stay. Each generation of them sends the collector over
all that the process has loaded, and it finds next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No automatic collections inside; afterwards the collector is as it was. What has no cycles is freed as always."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def paused_at_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is made with the collector paused the first time, when it compiles."""
    is_first = True

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return call(*args, **kwargs)
        is_first = False
        with paused():
            return call(*args, **kwargs)

    return run
