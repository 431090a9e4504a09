"""Wrap functions of torch and of other packages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrapped(declared: Any, wrapper: Callable[..., Any]) -> Any:
    """Return a function or method, as declared in its class, that calls `wrapper(original, *args, **kwargs)`."""
    original = declared.__func__ if isinstance(declared, classmethod | staticmethod) else declared

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    call.tritium_original = original  # type: ignore[attr-defined]
    return type(declared)(call) if original is not declared else call


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap a function of a module or class for the rest of the process; do nothing if it is wrapped or missing."""
    if hasattr(owner, name) and not hasattr(getattr(owner, name), "tritium_original"):
        setattr(owner, name, wrapped(inspect.getattr_static(owner, name), wrapper))
