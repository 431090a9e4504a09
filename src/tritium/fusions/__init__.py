"""REWRITES: one file per fusion. `catalog()` walks this folder and the entry points `tritium.fusions`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from tritium import catalog as catalogues
from tritium.fusions.fusion import Call, Fusion, Match

__all__ = ["Call", "Fusion", "Match", "catalog", "files"]


@functools.cache
def _entries() -> dict[str, catalogues.Entry[Fusion]]:
    own = catalogues.walk(sys.modules[__name__], "FUSION", Fusion)
    return catalogues.unique([*own, *catalogues.plugins("tritium.fusions", Fusion)], "fusion")


def catalog() -> dict[str, Fusion]:
    """Return every fusion by name."""
    return {name: entry.value for name, entry in _entries().items()}


def files() -> list[Path]:
    """Return the files that determine which regions are matched: part of every cache key."""
    own = Path(__file__).parent
    return [*sorted(own.rglob("*.py")), *(entry.file for entry in _entries().values())]
