"""Triton's interpreter, in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


def interpreted(module: str, function: str, arguments: str = "") -> int:
    """Call a function of a module of these tests there; it returns how many things it checked."""
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("Triton's interpreter runs with numpy 2.4 since Triton 3.7")
    program = f"import torch; from {module} import {function} as check; print(check({arguments}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, metadata.version(package).split(".")[:2]))
