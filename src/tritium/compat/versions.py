"""The versions of torch and of other installed packages."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

Version = tuple[int, int]


def parse_version(text: str) -> Version:
    """Return major and minor as integers, so that 2.13 is newer than 2.2.

    >>> parse_version("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2])


TORCH = parse_version(torch.__version__)


def version_text() -> str:
    """Return major and minor: a measurement is valid for one minor version."""
    return ".".join(map(str, TORCH))


def decline_name(owner: Any, name: str, parameters: Sequence[str] = ()) -> str | None:
    """Return how a name of this torch differs from the expected one: it is missing, or takes other parameters; or None."""
    value, path = getattr(owner, name, None), f"{owner.__name__}.{name}"
    if value is None:
        return f"torch {version_text()} has no {path}"
    signature = inspect.signature(value).parameters if parameters else {}
    missing = ", ".join(parameter for parameter in parameters if parameter not in signature)
    return f"{path} of torch {version_text()} takes no {missing}" if missing else None


def versions() -> dict[str, str | None]:
    """Return the versions that affect compiled code; triton's without importing it."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    metadata = importlib.import_module("importlib.metadata")
    for package in ("triton", "diffusers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
