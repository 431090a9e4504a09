"""Triton's interpreter, in processes of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

from support.forks import Forks


def interpreted(module: str, function: str, arguments: str = "") -> int:
    """Call a function of a module of these tests there; it returns how many things it checked."""
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("Triton's interpreter runs with numpy 2.4 since Triton 3.7")
    program = f"import torch; from {module} import {function} as check; print(check({arguments}))"
    with tempfile.TemporaryDirectory() as folder:
        printed = _forks().run(program, {**os.environ, "TRITON_INTERPRET": "1"}, Path(folder))
    return int(printed.split()[-1])


@functools.cache
def _forks() -> Forks:
    forks = Forks(seeds=(0,), TRITON_INTERPRET="1")
    atexit.register(forks.close)
    return forks


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, metadata.version(package).split(".")[:2]))
