"""Differences between torch versions, and private doors into torch, that captured graphs need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def storage_users(tensor: torch.Tensor) -> int | None:
    """How many tensors and other owners hold the memory behind a tensor; None where this torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(tensor.untyped_storage()._cdata)) if count is not None else None


def lie_at(args: list[Any], pointers: list[int | None], indices: list[int]) -> bool:
    """Whether some tensors among arguments lie where a list of all arguments' addresses says."""
    # There where torch is built for CUDA.
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is not None:
        return bool(compare(args, pointers, indices))
    return [args[index].data_ptr() for index in indices] == [pointers[index] for index in indices]


def has_one_address_per_element(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as torch can tell without counting."""
    check: Any = torch._debug_has_internal_overlap
    # 0: no overlap, 1: overlap, 2: too hard to say.
    return int(check(tensor)) == 0


def register_generator(graph: Any, generator: torch.Generator) -> None:
    """Let a CUDA graph draw new numbers of a generator on each replay, as it does of the default one by itself."""
    register = getattr(graph, "register_generator_state", None)
    if register is None:
        raise RuntimeError("this torch cannot replay random numbers of a generator that is not the default one")
    register(generator)


@contextlib.contextmanager
def fresh_cublas_workspaces() -> Iterator[None]:
    """Let cuBLAS take its workspace anew inside, and forget it afterwards.

    A recording keeps the address of the workspace. It must lie in the recordings' own pool: one that torch keeps for a
    stream is freed by whoever clears the workspaces, as Inductor's own graphs do.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


# torch's stance belongs to the process: overlapping changes would leave it changed.
_STANCE = threading.RLock()


@contextlib.contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """Run compiled functions eagerly inside, in all threads; threads that enter wait for each other."""
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield
