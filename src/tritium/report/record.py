"""The base of all records: dataclasses that become plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class Record:
    """A dataclass with its fields as data that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        return as_dict(self)


def as_dict(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, with those of inner dataclasses, as data that JSON can hold."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
