"""REWRITES: one file per fusion. `catalog()` walks this folder and the entry points `tritium.fusions`."""

from __future__ import annotations

import functools
import graphlib
import sys
from collections.abc import Iterable
from pathlib import Path

from tritium import catalog as catalogues
from tritium.errors import CatalogError, nearest
from tritium.fusions.fusion import Call, Fusion, Match

__all__ = ["Call", "Fusion", "Match", "catalog", "families", "files", "ordered"]


@functools.cache
def _entries() -> dict[str, catalogues.Entry[Fusion]]:
    own = catalogues.walk(sys.modules[__name__], "FUSION", Fusion)
    return catalogues.unique([*own, *catalogues.plugins("tritium.fusions", Fusion)], "fusion")


def catalog() -> dict[str, Fusion]:
    """Return every fusion by name, in the order in which they match."""
    return {fusion.name: fusion for fusion in ordered(entry.value for entry in _entries().values())}


def ordered(fusions: Iterable[Fusion]) -> list[Fusion]:
    """Return fusions in the order of their `before`, regions last."""
    by_name: dict[str, Fusion] = {}
    for fusion in fusions:
        if by_name.setdefault(fusion.name, fusion) is not fusion:
            raise CatalogError(f"two fusions are named {fusion.name!r}")
    earlier: dict[str, list[str]] = {name: [] for name in by_name}
    for fusion in by_name.values():
        for name in fusion.before:
            if name not in by_name:
                raise CatalogError(f"fusion {fusion.name!r} is before {name!r}; {nearest(name, by_name)}")
            earlier[name].append(fusion.name)
    try:
        order = list(graphlib.TopologicalSorter(earlier).static_order())
    except graphlib.CycleError as error:
        raise CatalogError(f"fusions are each before the other: {', '.join(error.args[1])}") from error
    return sorted((by_name[name] for name in order), key=lambda fusion: fusion.region)


def families() -> list[str]:
    """Return the families that all fusions declare: each has a switch in `tritium.FusionPatterns`."""
    return list(dict.fromkeys(family for fusion in catalog().values() for family in fusion.families))


def files() -> list[Path]:
    """Return the files that determine which regions are matched: part of every cache key."""
    own = Path(__file__).parent
    return [*sorted(own.rglob("*.py")), *(entry.file for entry in _entries().values())]
