"""MEANING: one file per op, or one folder for a long op.

`catalog()` walks this folder and registers every op with PyTorch, once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from tritium import catalog as catalogues
from tritium.errors import CatalogError, nearest
from tritium.ops.bridge import custom_op
from tritium.ops.op import (
    INDUCTOR,
    REFERENCE,
    Arguments,
    Op,
    Provider,
    Registration,
    Result,
    Sample,
    failed_providers,
    launch_provider,
)

__all__ = [
    "INDUCTOR",
    "REFERENCE",
    "Arguments",
    "Op",
    "Provider",
    "Sample",
    "catalog",
    "custom_op",
    "failed_providers",
    "files",
    "providers",
    "runner",
]


@functools.cache
def _entries() -> dict[str, catalogues.Entry[Op]]:
    return catalogues.unique(catalogues.walk(sys.modules[__name__], "OP", Op), "op")


@functools.cache
def _plugged_in() -> tuple[catalogues.Entry[Provider], ...]:
    return tuple(catalogues.plugins("tritium.providers", Provider))


@functools.cache
def _registration() -> Registration:
    ops = {name: entry.value for name, entry in _entries().items()}
    return Registration(ops, {name: _providers_of(op) for name, op in ops.items()})


def _providers_of(op: Op) -> dict[str, Provider]:
    found = {provider.name: provider for provider in op.providers}
    for entry in _plugged_in():
        if entry.value.op not in _entries():
            raise CatalogError(f"{entry.origin}: no op {entry.value.op!r}; {nearest(entry.value.op, _entries())}")
        if entry.value.op == op.name:
            if entry.value.name in found:
                raise CatalogError(f"{entry.origin}: op {op.name!r} has a provider {entry.value.name!r} already")
            found[entry.value.name] = entry.value
    return found


def catalog() -> dict[str, Op]:
    """Return every op by name, registered with PyTorch's dispatcher as `tritium::<name>`."""
    _registration()
    return {name: entry.value for name, entry in _entries().items()}


def providers(op: Op) -> dict[str, Provider]:
    """Return the owned providers of an op by name.

    Every op also has the providers `inductor` and `reference`.
    """
    _registration()
    return _providers_of(op)


def runner(op: Op, provider: str) -> Callable[..., Result]:
    """Return the function that an op's operator calls for a provider, to bypass the dispatcher."""
    return functools.partial(launch_provider, op, providers(op), provider=provider)


def files() -> list[Path]:
    """Return the source files of all ops and plug-in providers: every cache key includes their content."""
    return [*sorted(Path(__file__).parent.rglob("*.py")), *(entry.file for entry in _plugged_in())]
