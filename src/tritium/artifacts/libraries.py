"""Store libraries of Inductor's C++ kernels next to Inductor's cache, under a digest of their content.

torch's artifacts contain the source of a CPU kernel but not its library, so a process that starts from them calls the
C++ compiler for every kernel. The digest covers source, settings, versions and CPU instructions: a library for other
instructions would kill the process and is never found.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from tritium import compat, device, disk


class Shelf:
    """The libraries under Inductor's cache folder, and all libraries that this process loaded."""

    def __init__(self) -> None:
        # Paths by digest. Libraries that Inductor compiled are in its folders.
        self.used: dict[str, Path] = {}

    def folder(self) -> Path:
        return compat.inductor.cache_dir() / "tritium" / "kernels"

    def path(self, digest: str) -> Path:
        return self.folder() / f"{digest}.so"

    def find(self, request: str) -> Path | None:
        path = self.path(digest(request))
        return path if path.exists() else None

    def loaded(self, request: str, library: Path) -> None:
        self.used[digest(request)] = library


SHELF = Shelf()


def install() -> None:
    """Make Inductor look up C++ kernels in the shelf before it compiles them."""
    compat.artifacts.share_libraries(SHELF.find, SHELF.loaded)


def digest(request: str) -> str:
    return disk.digest(*_machine(), request)


@functools.cache
def _machine() -> tuple[str, ...]:
    return torch.__version__, str(sys.implementation.cache_tag), device.cpu_name(), *device.cpu_instructions()
