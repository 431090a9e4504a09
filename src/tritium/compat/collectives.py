"""Collectives that Dynamo traces as operators of named groups, and a group without other ranks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group, given its name; the tensor stays as it is."""
    ops: Any = torch.ops._c10d_functional
    total: torch.Tensor = ops.wait_tensor(ops.all_reduce(tensor, "sum", group))
    return total


def has_other_ranks() -> bool:
    """Return True if this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def name_of(group: Any) -> str:
    """Return the name of a process group, which is equal on all of its ranks."""
    return str(group.group_name)


def start_all_to_all(tensor: torch.Tensor, group: str, sent: list[int], received: list[int]) -> torch.Tensor:
    """Start to exchange rows of dim 0, so many with each rank of a group; read the result after `wait`."""
    ops: Any = torch.ops._c10d_functional
    exchanged: torch.Tensor = ops.all_to_all_single(tensor, received, sent, group)
    return exchanged


def start_all_gather(tensor: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Start to gather a tensor of all ranks of a group, concatenated along dim 0; read the result after `wait`."""
    ops: Any = torch.ops._c10d_functional
    gathered: torch.Tensor = ops.all_gather_into_tensor(tensor, ranks, group)
    return gathered


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started."""
    ready: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return ready


def is_collective(target: Any) -> bool:
    """Return True for an operator that exchanges tensors between ranks."""
    return str(target).startswith("_c10d_functional")


def abandon(group: Any) -> None:
    """Destroy a process group whose ranks may wait in a collective."""
    if "nccl" in dist.get_backend(group):
        # Its kernels wait for the other ranks for ever.
        group.abort()
    dist.destroy_process_group(group)


# Texts of exceptions on ranks whose peers have left a collective.
_LEFT = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "aborted",
    "Remote process exited",
    "is not initialized",
)


def was_left_by_others(error: BaseException) -> bool:
    """Return True for an exception in a collective that another rank has left."""
    is_of_group = isinstance(error, (dist.DistError, RuntimeError)) and not isinstance(error, torch.OutOfMemoryError)
    return is_of_group and any(text in str(error) for text in _LEFT)


def store() -> Any:
    """Return the store of the world: keys and values that all ranks see."""
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of a world of this size, whose collectives send nothing; the process must have no group."""
    # Importing it registers the backend.
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fakes.FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_size(name: str) -> int:
    groups: Any = dist.distributed_c10d
    return int(groups._resolve_process_group(name).size())
