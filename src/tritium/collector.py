"""Python's cyclic garbage collector, paused while modules are imported and models compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector while importing or compiling. Reference counts still free objects.

    Importing and running a compiler creates hundreds of thousands of lasting objects. Every collection of them also
    visits all earlier objects of the process, and frees almost nothing: it takes a quarter of the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Move new objects to the oldest generation: most stay, and the next collection would visit all. unfreeze moves
            # all frozen objects there, so do nothing if other code has frozen some. Counting these visits all of them: only
            # if a collection is due.
            if gc.get_count()[0] > gc.get_threshold()[0] and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
