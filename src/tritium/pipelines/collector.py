"""Pause Python's cyclic garbage collector during compilation.

Importing and running a compiler creates hundreds of thousands of lasting objects. Every collection of them also visits
all earlier objects of the process, and frees almost nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disable collections inside, then restore the setting. Reference counts still free objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _let_all_be_old()
            gc.enable()


def _let_all_be_old() -> None:
    """Move new objects to the oldest generation: most stay, and the next collection would visit all."""
    # unfreeze moves all frozen objects to the oldest generation, so do nothing if other code has frozen some.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
