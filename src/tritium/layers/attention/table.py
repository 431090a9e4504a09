"""Measured times of attention: one JSON file per device, from the package or the user's cache.

A row is valid for the versions it was measured with; rows of other versions stay in the file unused.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tritium import disk
from tritium.compat import attention as compat_attention
from tritium.tuning import Machine, tables


@dataclass(frozen=True)
class Row:
    """One tuning result: winner, median ms per candidate, and why others were skipped."""

    key: str
    winner: str
    # Median milliseconds by candidate.
    ms: Mapping[str, float]
    # Why a candidate was not measured, or was dropped: it failed, or its error was too large.
    dropped: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        """Return a row read from a file; raise TypeError if its fields have wrong types."""
        row = cls(**found)
        texts = [row.key, row.winner]
        for words in (row.ms, row.dropped, row.versions):
            if not isinstance(words, dict):
                raise TypeError(f"{words!r} is no mapping")
            texts += words
        if not all(isinstance(text, str) for text in [*texts, *row.dropped.values(), *row.versions.values()]):
            raise TypeError("names and reasons are words")
        if not all(isinstance(value, (int, float)) for value in row.ms.values()):
            raise TypeError("milliseconds are numbers")
        return row


def file_name(device: str) -> str:
    return f"attention-{Machine(device).file_name}"


def read(path: Path) -> dict[str, Row]:
    """Return the rows of a file by key; an empty dict if the file is missing or unreadable."""
    try:
        rows = list(json.loads(path.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    found = {}
    for entry in rows:
        # Skip only the rows that are malformed, such as ones edited by hand.
        with contextlib.suppress(TypeError):
            row = Row.from_dict(entry)
            found[row.key] = row
    return found


def write(device: str, rows: Iterable[Row]) -> None:
    """Add rows to the user's table; the last row of a key wins."""
    path = tables.user_folder() / file_name(device)
    merged = read(path) | {row.key: row for row in rows}
    lines = ",\n".join(json.dumps(asdict(merged[key])) for key in sorted(merged))
    disk.write(path, f'{{\n"device": {json.dumps(device)},\n"rows": [\n{lines}\n]\n}}\n', make_folder=True)


def measured(device: str, key: str) -> Row | None:
    """Return the user's row for a key if it was measured with the installed versions, or None."""
    row = read(tables.user_folder() / file_name(device)).get(key)
    return row if row is not None and dict(row.versions) == compat_attention.versions() else None


def contents() -> list[bytes]:
    """Return the current bytes of the user's tables of all devices, without parsing them."""
    found: list[bytes] = []
    try:
        paths = sorted(tables.user_folder().glob("attention-*.json"))
    except OSError:
        # Treat an unreadable folder as empty; its name may be too long, for example.
        return found
    for path in paths:
        # Another process may be replacing the file.
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


def shipped(device: str, key: str) -> Row | None:
    """Return the package's row for a device and key, whatever the versions: better than a rule."""
    return _shipped(device).get(key)


@functools.cache
def _shipped(device: str) -> dict[str, Row]:
    return read(tables.SHIPPED / file_name(device))
