"""The only reader of `os.environ`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "TRITIUM_"

# Names an attention implementation, or how to choose one. Overrides the argument of a call.
ATTENTION = "TRITIUM_ATTENTION"

# oneDNN reads this when torch is imported (see `tritium doctor`).
ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"

# Folder of compiled Triton kernels. If unset, Inductor sets it with its first kernel.
TRITON_CACHE = "TRITON_CACHE_DIR"


def tritium_variables() -> dict[str, str]:
    """Return all variables that start with `TRITIUM_`, with their current values."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def get(name: str) -> str | None:
    return os.environ.get(name)


def set_unless_set(name: str, value: str) -> str:
    """Set a variable if it is unset, and return its value."""
    return os.environ.setdefault(name, value)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with changes, for a child that can import the same modules.

    `sys.path` is passed on, so that a checkout on it need not be installed.
    """
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **changes}


def in_terminal_free_ci() -> bool:
    """Return True in a continuous-integration service, where progress bars only fill logs."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def triton_interpreted() -> bool:
    """Return True if Triton kernels run in Triton's interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def search_path() -> list[Path]:
    return [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]


def runtime_home() -> Path:
    """Return the folder for this user's sockets: in `XDG_RUNTIME_DIR`, or a private one among temporary files."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given, "tritium") if given else Path(tempfile.gettempdir(), f"tritium-{os.getuid()}")


def cache_home() -> Path:
    """Return the folder for data that can be recreated, as in the XDG specification."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # The user has no entry in the password database, as in many containers.
        return Path(tempfile.gettempdir())
