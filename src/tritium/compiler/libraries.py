"""Libraries of Inductor's C++ kernels, found again by what they are made of.

torch's own artifacts hold the source of a CPU kernel and not the library: a process that starts from them calls the C++
compiler once for every kernel. A shelf beside Inductor's cache holds libraries under a digest of source, settings,
versions and CPU. A library for other instructions is never found, so it cannot kill the process.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

import torch

from tritium import compat, device


class Shelf:
    """The libraries under Inductor's cache folder, and those that this process loaded from anywhere."""

    def __init__(self) -> None:
        # By digest. Those that Inductor compiled lie in its own folders.
        self.used: dict[str, Path] = {}

    def folder(self) -> Path:
        return compat.cache_dir() / "tritium" / "kernels"

    def path(self, digest: str) -> Path:
        return self.folder() / f"{digest}.so"

    def find(self, request: str) -> Path | None:
        path = self.path(digest(request))
        return path if path.exists() else None

    def loaded(self, request: str, library: Path) -> None:
        self.used[digest(request)] = library


SHELF = Shelf()


def install() -> None:
    """From now on Inductor's C++ kernels are looked for on the shelf first."""
    compat.share_libraries(SHELF)


def digest(request: str) -> str:
    return hashlib.sha256(f"{_machine()}\0{request}".encode()).hexdigest()


@functools.cache
def _machine() -> str:
    parts = (torch.__version__, sys.implementation.cache_tag, device.cpu_name(), *device.cpu_instructions())
    return "\0".join(map(str, parts))
