"""MEANING: one file per op, or one folder for a long op.

`catalog()` walks this folder and registers every op with PyTorch, once.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from tritium import catalog as catalogues
from tritium.errors import CatalogError, nearest
from tritium.ops.bridge import custom_op
from tritium.ops.op import INDUCTOR, REFERENCE, Arguments, Op, Provider, failed_providers, register

__all__ = [
    "INDUCTOR",
    "REFERENCE",
    "Arguments",
    "Op",
    "Provider",
    "catalog",
    "custom_op",
    "declines",
    "failed_providers",
    "files",
    "providers",
]


@functools.cache
def _entries() -> dict[str, catalogues.Entry[Op]]:
    return catalogues.unique(catalogues.walk(sys.modules[__name__], "OP", Op), "op")


@functools.cache
def _plugged_in() -> tuple[catalogues.Entry[Provider], ...]:
    return tuple(catalogues.plugins("tritium.providers", Provider))


@functools.cache
def _registered() -> dict[str, Op]:
    ops = {name: entry.value for name, entry in _entries().items()}
    register(ops, {name: _providers_of(op) for name, op in ops.items()})
    return ops


def _providers_of(op: Op) -> dict[str, Provider]:
    owned = {provider.name: provider for provider in op.providers}
    for entry in _plugged_in():
        if entry.value.op not in _entries():
            raise CatalogError(f"{entry.origin}: no op {entry.value.op!r}; {nearest(entry.value.op, _entries())}")
        if entry.value.op == op.name:
            if entry.value.name in owned:
                raise CatalogError(f"{entry.origin}: op {op.name!r} has a provider {entry.value.name!r} already")
            owned[entry.value.name] = entry.value
    return owned


def catalog() -> dict[str, Op]:
    """Return every op by name, registered with PyTorch's dispatcher as `tritium::<name>`."""
    return dict(_registered())


def providers(op: Op) -> dict[str, Provider]:
    """Return the owned providers of an op by name; `inductor` and `reference` are not among them."""
    _registered()
    return _providers_of(op)


# The suffixes of files with code.
CODE = (".py", ".cu")

# Why a provider is not chosen where only exact ones are.
LOSSY = "it is lossy: used by name, or where Quantize(attention=...) allows it"


def declines(op: Op, arguments: Arguments, *, lossy: bool = False) -> dict[str, str | None]:
    """Return for each owned provider of an op why it cannot take some arguments, or None; `lossy` admits lossy ones."""
    return {
        name: LOSSY if provider.lossy and not lossy else provider.decline(arguments)
        for name, provider in providers(op).items()
    }


def code_in(folder: Path) -> list[Path]:
    """Return the files of a folder that decide what is computed: Python, and kernels in CUDA C++."""
    return sorted(file for file in folder.rglob("*") if file.suffix in CODE)


def files() -> list[Path]:
    """Return the source files of all ops and plug-in providers: every cache key includes their content."""
    return [*code_in(Path(__file__).parent), *(entry.file for entry in _plugged_in())]
