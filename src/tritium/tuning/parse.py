"""Convert JSON data to dataclasses by their annotations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


_hints = functools.cache(get_type_hints)


def parse(kind: type[T], value: Any) -> T:
    """Return an instance of a dataclass; raise TypeError for a missing field or one of the wrong type.

    Other fields are left out: they may belong to another version of the package.

    >>> @dataclasses.dataclass
    ... class Limit:
    ...     reads: int
    >>> parse(Limit, {"reads": 3, "unit": "loads"})
    Limit(reads=3)
    >>> parse(Limit, {"reads": True})
    Traceback (most recent call last):
    TypeError: reads is not int: True
    """
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is not an object")
    names = [entry.name for entry in dataclasses.fields(kind) if entry.name in value]  # type: ignore[arg-type]
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _as(hints[name], value[name], name) for name in names})


def _as(hint: Any, value: Any, name: str) -> Any:
    """Return a value converted to an annotation: a plain type, a dataclass, a mapping, a tuple, or one of these or None."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _as(arguments[0], value, name)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value)  # type: ignore[arg-type]
    if origin is Mapping and isinstance(value, dict):
        return {str(inner): _as(arguments[1], part, f"{name} of {inner!r:.80}") for inner, part in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_as(arguments[0], part, name) for part in value)
    # A bool is an int, and an integer is a valid float.
    if origin is None and isinstance(value, (int, float) if hint is float else hint) and not isinstance(value, bool):
        return value
    raise TypeError(f"{name} is not {getattr(hint, '__name__', hint)}: {value!r:.80}")
