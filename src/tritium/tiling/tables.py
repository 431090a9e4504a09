"""Tables of reductions: one entry a device in a JSON file that is shipped, and in one of this machine, which comes first."""

from __future__ import annotations

import functools
import json
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
    """The entries by device; none where there is no such file or it cannot be read."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {device: entry for device, entry in entries.items() if Table.from_dict(entry)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write(path: Path, device: str, entry: Mapping[str, Any]) -> None:
    """Put a device's entry into a file, and leave the others."""
    entries = {**read(path), device: dict(entry)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    forget()


@functools.cache
def entries() -> Entries:
    """Every device's entry that holds here."""
    own = {
        device: entry
        for device, entry in read(own_file()).items()
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
