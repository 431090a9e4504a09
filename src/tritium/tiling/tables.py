"""Tables of reductions: one entry per device, from a shipped JSON file and one of this machine.

The entries of this machine take precedence.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritium import compat
from tritium.tiling.reductions import DEFAULT, Table
from tritium.tuning import tables as tuned

NAME = "reductions.json"

Entries = dict[str, dict[str, Any]]


def shipped_file() -> Path:
    return tuned.SHIPPED / NAME


def own_file() -> Path:
    """Return the file with this machine's measurements."""
    return tuned.user_folder() / NAME


def read(path: Path) -> Entries:
    """Return the entries of a file by device; a damaged file or entry is left out."""
    return _load(path)[0]


def _load(path: Path) -> tuple[Entries, str | None]:
    """Return the entries that can be read, and the damage of the file, or None."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    # Deep nesting overflows the parser's stack.
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"it cannot be read ({type(error).__name__})"
    if not isinstance(found, dict):
        return {}, "it is not an object"
    good: Entries = {}
    damage = None
    for device, entry in found.items():
        try:
            Table.from_dict(entry)
        except (TypeError, ValueError):
            damage = f"the entry of {device[:80]!r} is not one of reductions"
        else:
            good[device] = entry
    return good, damage


def write(path: Path, device: str, entry: Mapping[str, Any]) -> None:
    """Write a device's entry to a file, and keep the others."""
    entries = {**read(path), device: dict(entry)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    forget()


@functools.cache
def entries() -> Entries:
    """Return the valid entries of every device; warn if this machine's file is damaged."""
    found, damage = _load(own_file())
    if damage is not None:
        warnings.warn(
            f"tritium: the table {own_file()} is damaged and what is damaged is ignored: {damage}",
            RuntimeWarning,
            stacklevel=2,
        )
    own = {
        device: entry
        for device, entry in found.items()
        # Another torch version generates other code, to which the measurements do not apply.
        if entry.get("torch") == compat.versions.version_text()
    }
    return {**read(shipped_file()), **own}


def forget() -> None:
    """Clear the cache after a file has changed."""
    entries.cache_clear()


def table_for(device: str) -> Table:
    """Return the table of a device, or one without measurements."""
    entry = entries().get(device)
    return Table.from_dict(entry) if entry is not None else DEFAULT
