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

# All libraries that this process loaded, by digest. Those that Inductor compiled are in its folders.
USED: dict[str, Path] = {}


def install() -> None:
    """Make Inductor look up C++ kernels here before it compiles them."""
    compat.artifacts.share_libraries(_find, _loaded)


def path(of_digest: str) -> Path:
    return compat.inductor.cache_dir() / "tritium" / "kernels" / f"{of_digest}.so"


def _find(request: str) -> Path | None:
    library = path(digest(request))
    return library if library.exists() else None


def _loaded(request: str, library: Path) -> None:
    USED[digest(request)] = library


def digest(request: str) -> str:
    return disk.digest(*_machine(), request)


@functools.cache
def _machine() -> tuple[str, ...]:
    return torch.__version__, str(sys.implementation.cache_tag), device.cpu_name(), *device.cpu_instructions()
