"""Which torch this is, and what else is installed."""

from __future__ import annotations

import importlib
import re

import torch

Version = tuple[int, int]


def parse_version(text: str) -> Version:
    """Major and minor as numbers, so that 2.13 is newer than 2.2.

    >>> parse_version("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2])


TORCH = parse_version(torch.__version__)


def version_text() -> str:
    """Major and minor: what a measurement stays valid for."""
    return ".".join(map(str, TORCH))


def versions() -> dict[str, str | None]:
    """Versions that decide what compiled code looks like; triton's without importing it."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    metadata = importlib.import_module("importlib.metadata")
    for package in ("triton", "diffusers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
