"""`--parallel`: read degrees, start the ranks of a command, and let the first rank alone print and write."""

from __future__ import annotations

import subprocess
import sys
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import typer

from tritium.errors import ConfigError, nearest
from tritium.techniques.parallel.config import AXES, Parallel
from tritium.techniques.parallel.mesh import check, start

AUTO = "auto"

# The arguments of the command line, which ranks get as well.
ARGUMENTS: ContextVar[tuple[str, ...]] = ContextVar("arguments")


def parallel_of(text: str) -> Parallel:
    """Return the config that an option stands for: `auto`, or degrees by axis.

    >>> parallel_of("cfg=2,ulysses=4").size
    8
    """
    if text == AUTO:
        return Parallel()
    found: dict[str, Any] = {}
    for part in text.split(","):
        axis, is_given, degree = part.strip().partition("=")
        if axis not in (*AXES, "vae"):
            raise ConfigError(f"--parallel has no axis {axis!r}; {nearest(axis, [*AXES, 'vae', AUTO])}")
        if axis == "vae" and degree in ("auto", "none"):
            found[axis] = "auto" if degree == "auto" else None
        elif is_given and degree.isdigit():
            found[axis] = int(degree)
        else:
            raise ConfigError(f"--parallel {part.strip()}: write {axis}=2 for two ranks, or --parallel auto")
    return Parallel(**found)


def launched() -> bool:
    """Return True in a rank that a launcher such as torchrun has started."""
    return dist.is_available() and dist.is_torchelastic_launched()


def joined(config: Parallel | None, gpus: int | None, device_type: str) -> bool:
    """Join the other ranks, or start them and exit; return True on the first, which prints and writes files."""
    if not launched():
        assert config is not None
        start_ranks(count_of(config, gpus, device_type))
    start(torch.device(device_type))
    if config is not None:
        check(config, dist.get_world_size())
    return dist.get_rank() == 0


def count_of(config: Parallel, gpus: int | None, device_type: str) -> int:
    """Return how many ranks to start; raise a `ConfigError` if they do not fit the degrees or the machine."""
    there = torch.cuda.device_count() if device_type == "cuda" else None
    count = gpus or (None if config.is_auto else config.size) or there
    if count is None:
        raise ConfigError("--parallel auto needs the number of ranks on a machine without GPUs: --gpus 2")
    if there is not None and count > there:
        raise ConfigError(f"{count} ranks need a GPU each, and this machine has {there}; start fewer, with --gpus")
    check(config, count)
    return count


def start_ranks(count: int) -> None:
    """Run this command on some ranks, and exit with its code; without GPUs they are processes on the CPU."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "tritium"]
    command = [sys.executable, "-m", *launcher, *ARGUMENTS.get()]
    code = subprocess.run(command, check=False).returncode  # noqa: S603 - the arguments of this process
    raise typer.Exit(code)
