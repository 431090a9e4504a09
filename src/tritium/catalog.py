"""Catalogues: walk a folder or an entry point group, and collect the values declared there.

A module declares one value under a fixed name (`OP`, `FUSION`, `PASS`); nothing registers itself by being imported.
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


# Entry points that could not be used, by group: each is warned about once.
_BROKEN: dict[str, dict[str, str]] = {}


def broken() -> list[str]:
    """Why plug-ins that were looked for cannot be used, one line each."""
    return [reason for reasons in _BROKEN.values() for reason in reasons.values()]


def plugins(group: str, kind: type[T]) -> list[Entry[T]]:
    """The values that installed distributions name in an entry point group; one that cannot be used is warned about."""
    found = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        where = f"entry point {point.name!r} of group {group!r} ({point.value})"
        try:
            found.append(_plugin(point, kind, where))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and is off then
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
    """Entries by name; two of one name are an error that names both places."""
    by_name: dict[str, Entry[T]] = {}
    for entry in entries:
        other = by_name.get(entry.value.name)
        if other is not None:
            raise CatalogError(f"{what} {entry.value.name!r} is declared twice: {other.origin} and {entry.origin}")
        by_name[entry.value.name] = entry
    return by_name
