"""Python's cyclic garbage collector, held back while something is compiled.

Importing and running a compiler makes hundreds of thousands of objects that stay. Each generation of them sends the collector over
all that the process has loaded, and it finds next to nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No automatic collections inside; afterwards the collector is as it was. What has no cycles is freed as always."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _let_all_be_old()
            gc.enable()


def _let_all_be_old() -> None:
    """New objects would be walked through the moment the collector is back: most of them stay, and count as old from here."""
    # Thawing moves everything into the oldest generation, also what somebody else had frozen.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
