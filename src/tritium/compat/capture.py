"""Differences between torch versions, and private torch APIs, for captured graphs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


def storage_users(tensor: torch.Tensor) -> int | None:
    """Return the number of owners of a tensor's memory; None if this torch cannot count them."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(tensor.untyped_storage()._cdata)) if count is not None else None


def without_owner(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the same memory as a storage that does not keep it: the allocator may use it again."""
    make: Any = torch._C._construct_storage_from_data_pointer
    found: torch.UntypedStorage = make(storage.data_ptr(), storage.device, storage.nbytes())
    return found


def lie_at(args: list[Any], pointers: list[int | None], indices: list[int]) -> bool:
    """Return True if the arguments at `indices` have the addresses in `pointers`."""
    # Available if torch is built for CUDA.
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is not None:
        return bool(compare(args, pointers, indices))
    return [args[index].data_ptr() for index in indices] == [pointers[index] for index in indices]


def has_one_address_per_element(tensor: torch.Tensor) -> bool:
    """Return True if no two elements share memory, as far as torch can tell without counting."""
    check: Any = torch._debug_has_internal_overlap
    # 0: no overlap, 1: overlap, 2: too expensive to determine.
    return int(check(tensor)) == 0


@contextlib.contextmanager
def fresh_cublas_workspaces() -> Iterator[None]:
    """Let cuBLAS allocate a new workspace inside, and free it afterwards.

    A captured graph keeps the address of the workspace. It must be in the memory pool of the captures: torch's
    workspace for a stream is freed when workspaces are cleared, as Inductor's CUDA graphs do.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def lock_pages(buffer: torch.Tensor) -> bool:
    """Lock the pages of host memory for copies to a GPU; return False if the system refuses."""
    runtime: Any = torch.cuda.cudart()
    # 1: usable from every CUDA context.
    return int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1)) == 0


def unlock_pages(buffer: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(buffer.data_ptr())


# torch's stance is global to the process: overlapping changes would not be restored.
_STANCE = threading.RLock()


@contextlib.contextmanager
def compiled_code_runs_eagerly() -> Iterator[None]:
    """Run compiled functions eagerly inside, in all threads; only one thread enters at a time."""
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield
