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
        if value is not None:
            found.append(_checked(value, kind, module, f"{module.__name__}.{attribute}", module.__name__))
    return found


# Why entry points are unusable, by group and name, so that each is warned about once.
_BROKEN: dict[tuple[str, str], str] = {}


def broken() -> list[str]:
    """Return one line per plug-in that could not be loaded."""
    return list(_BROKEN.values())


def plugins(group: str, kind: type[T]) -> list[Entry[T]]:
    """Return the values that installed packages declare in an entry point group; warn about unusable ones."""
    found = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        where = f"entry point {point.name!r} of group {group!r} ({point.value})"
        try:
            value, module = point.load(), importlib.import_module(point.module)
            found.append(_checked(value, kind, module, "it", where))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it is disabled then
            reason = str(error) if isinstance(error, CatalogError) else f"{type(error).__name__}: {error}"
            line = " ".join(f"{where} is not used: {reason}".split())
            if line != _BROKEN.get((group, point.name)):
                _BROKEN[group, point.name] = line
                warnings.warn(f"tritium: {line}", RuntimeWarning, stacklevel=2)
    return found


def _checked(value: object, kind: type[T], module: ModuleType, what: str, origin: str) -> Entry[T]:
    if not isinstance(value, kind):
        raise CatalogError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    if module.__file__ is None:
        raise CatalogError(f"{what} has no file, so its content cannot be part of a cache key")
    return Entry(value, Path(module.__file__), origin)


def unique(entries: Iterable[Entry[T]], what: str) -> dict[str, Entry[T]]:
    """Return entries by name; raise a `CatalogError` that names both files if a name is declared twice."""
    by_name: dict[str, Entry[T]] = {}
    for entry in entries:
        other = by_name.setdefault(entry.value.name, entry)
        if other is not entry:
            raise CatalogError(f"{what} {entry.value.name!r} is declared twice: {other.origin} and {entry.origin}")
    return by_name
