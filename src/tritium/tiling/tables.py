"""Tables of reductions: one entry a device in a JSON file that is shipped, and in one of this machine, which comes first."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritium import compat, tuned
from tritium.tiling.reductions import DEFAULT, Table

NAME = "reductions.json"

Entries = dict[str, dict[str, Any]]


def shipped_file() -> Path:
    return tuned.SHIPPED / NAME


def own_file() -> Path:
    """What was measured on this machine."""
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
    # Deep nesting exhausts the parser's stack.
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
    """Put a device's entry into a file, and leave the others."""
    entries = {**read(path), device: dict(entry)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    forget()


@functools.cache
def entries() -> Entries:
    """Return every device's entry that holds here; a damaged file of this machine's own is told with a warning."""
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
        # Another torch generates other code: what was measured of it is no longer known.
        if entry.get("torch") == compat.version_text()
    }
    return {**read(shipped_file()), **own}


def forget() -> None:
    """Read the files anew: one has changed."""
    entries.cache_clear()


def table_for(device: str) -> Table:
    """What is known about a device; the rules alone where nothing is."""
    entry = entries().get(device)
    return Table.from_dict(entry) if entry is not None else DEFAULT
