"""Catalogues: collect the values declared in a folder's modules or in an entry point group.

A module declares one value under a fixed name (`OP`, `FUSION`, `PASS`). Importing a module registers nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import warnings
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
    """A declared value and its origin."""

    value: T
    file: Path
    origin: str


def walk(package: ModuleType, attribute: str, kind: type[T]) -> list[Entry[T]]:
    """Return the values that a package's modules declare under `attribute`, sorted by module name."""
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


# Unusable entry points by group, so that each is warned about once.
_BROKEN: dict[str, dict[str, str]] = {}


def broken() -> list[str]:
    """Return one line per plug-in that could not be loaded."""
    return [reason for reasons in _BROKEN.values() for reason in reasons.values()]


def plugins(group: str, kind: type[T]) -> list[Entry[T]]:
    """Return the values that installed packages declare in an entry point group; warn about unusable ones."""
    found = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        where = f"entry point {point.name!r} of group {group!r} ({point.value})"
        try:
            found.append(_plugin(point, kind, where))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it is disabled then
            reason = str(error) if isinstance(error, CatalogError) else f"{type(error).__name__}: {error}"
            line = " ".join(f"{where} is not used: {reason}".split())
            if line != _BROKEN.setdefault(group, {}).get(point.name):
                _BROKEN[group][point.name] = line
                warnings.warn(f"tritium: {line}", RuntimeWarning, stacklevel=2)
    return found


def _plugin(point: importlib.metadata.EntryPoint, kind: type[T], where: str) -> Entry[T]:
    value = point.load()
    if not isinstance(value, kind):
        raise CatalogError(f"it is a {type(value).__name__}, not a {kind.__name__}")
    module = importlib.import_module(point.module)
    if module.__file__ is None:
        raise CatalogError("it has no file, so its content cannot be part of a cache key")
    return Entry(value, Path(module.__file__), where)


def unique(entries: Iterable[Entry[T]], what: str) -> dict[str, Entry[T]]:
    """Return entries by name; raise a `CatalogError` that names both files if a name is declared twice."""
    by_name: dict[str, Entry[T]] = {}
    for entry in entries:
        other = by_name.get(entry.value.name)
        if other is not None:
            raise CatalogError(f"{what} {entry.value.name!r} is declared twice: {other.origin} and {entry.origin}")
        by_name[entry.value.name] = entry
    return by_name
