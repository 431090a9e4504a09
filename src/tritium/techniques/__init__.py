"""TECHNIQUES: one file or folder per technique. `catalog()` walks this folder and the entry points `tritium.techniques`."""

from __future__ import annotations

import functools
import graphlib
import sys
from pathlib import Path
from typing import Any

from tritium import catalog as catalogues
from tritium.errors import CatalogError, nearest
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["Note", "Part", "Technique", "catalog", "files"]


@functools.cache
def _entries() -> dict[str, catalogues.Entry[Technique[Any, Any]]]:
    own = catalogues.walk(sys.modules[__name__], "TECHNIQUE", Technique)
    entries = catalogues.unique([*own, *catalogues.plugins("tritium.techniques", Technique)], "technique")
    owners: dict[type, str] = {}
    for technique in (entry.value for entry in entries.values()):
        other = owners.setdefault(technique.config, technique.name)
        if other != technique.name:
            raise CatalogError(
                f"techniques {other!r} and {technique.name!r} have the same config, {technique.config.__name__}"
            )
        for name in technique.after:
            if name not in entries:
                raise CatalogError(f"technique {technique.name!r} is after {name!r}; {nearest(name, entries)}")
    try:
        order = graphlib.TopologicalSorter({name: entries[name].value.after for name in entries}).static_order()
        return {name: entries[name] for name in order}
    except graphlib.CycleError as error:
        raise CatalogError(f"techniques are each after the other: {', '.join(error.args[1])}") from error


def catalog() -> dict[str, Technique[Any, Any]]:
    """Return every technique by name, in the order in which they are applied."""
    return {name: entry.value for name, entry in _entries().items()}


def __getattr__(name: str) -> Any:
    """Return the config of a technique by its class name, as in `from tritium.techniques import Graphs`."""
    configs = {} if name.startswith("_") else {entry.config.__name__: entry.config for entry in catalog().values()}
    if name not in configs:
        raise AttributeError(f"module 'tritium.techniques' has no attribute {name!r}; {nearest(name, configs)}")
    return configs[name]


def files() -> list[Path]:
    """Return the files of all techniques and plug-ins: part of the fingerprint of a recipe."""
    return [*sorted(Path(__file__).parent.rglob("*.py")), *(entry.file for entry in _entries().values())]
