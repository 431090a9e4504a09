"""Catalogues: walk a folder or an entry point group, and collect the values declared there.

A module declares one value under a fixed name (`OP`, `FUSION`, `PASS`); nothing registers itself by being imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from tritium.errors import CatalogError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A declared value and where it came from."""

    value: T
    file: Path
    origin: str


def walk(package: ModuleType, attribute: str, kind: type[T]) -> list[Entry[T]]:
    """The values that the modules of a package declare under `attribute`, in the order of their file names."""
    found = []
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        value = getattr(module, attribute, None)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise CatalogError(f"{module.__name__}.{attribute} is a {type(value).__name__}, not a {kind.__name__}")
        if module.__file__ is None:
            raise CatalogError(f"{module.__name__} has no file, so its content cannot be part of a cache key")
        found.append(Entry(value, Path(module.__file__), module.__name__))
    return found


def plugins(group: str, kind: type[T]) -> list[Entry[T]]:
    """The values that installed distributions name in an entry point group."""
    found = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        where = f"entry point {point.name!r} of group {group!r} ({point.value})"
        try:
            value = point.load()
        except Exception as error:
            raise CatalogError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(value, kind):
            raise CatalogError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
        module = importlib.import_module(point.module)
        if module.__file__ is None:
            raise CatalogError(f"{where} has no file, so its content cannot be part of a cache key")
        found.append(Entry(value, Path(module.__file__), where))
    return found


def unique(entries: Iterable[Entry[T]], what: str) -> dict[str, Entry[T]]:
    """Entries by name; two of one name are an error that names both places."""
    by_name: dict[str, Entry[T]] = {}
    for entry in entries:
        other = by_name.get(entry.value.name)
        if other is not None:
            raise CatalogError(f"{what} {entry.value.name!r} is declared twice: {other.origin} and {entry.origin}")
        by_name[entry.value.name] = entry
    return by_name
