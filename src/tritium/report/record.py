"""The base of all records: dataclasses that become plain data."""

from __future__ import annotations

import dataclasses
from typing import Any


class Record:
    """A dataclass with its fields as data that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]
