"""The only reader of `os.environ`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "TRITIUM_"

# Names a way to compute attention, or how it is chosen; it wins over what a call says.
ATTENTION = "TRITIUM_ATTENTION"

# oneDNN reads this when torch is imported; see `tritium doctor`.
ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"

# Where Triton keeps compiled kernels; Inductor sets it with its first kernel, unless it is set.
TRITON_CACHE = "TRITON_CACHE_DIR"


def tritium_variables() -> dict[str, str]:
    """All variables that start with `TRITIUM_`, as they are now."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def get(name: str) -> str | None:
    return os.environ.get(name)


def set_unless_set(name: str, value: str) -> str:
    """The value of a variable, which is this one if it had none."""
    return os.environ.setdefault(name, value)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with changes, for a child process that imports what this one can import.

    `sys.path` is passed on: a program that puts a checkout there need not have it installed.
    """
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **changes}


def in_terminal_free_ci() -> bool:
    """Whether a continuous-integration service runs us, where progress bars only fill logs."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def triton_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def search_path() -> list[Path]:
    return [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]


def cache_home() -> Path:
    """The folder for what can be made again, as the XDG specification has it."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # Somebody whom the system does not know, as in many containers.
        return Path(tempfile.gettempdir())
