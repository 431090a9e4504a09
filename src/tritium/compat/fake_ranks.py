"""A process group without other ranks: collectives return tensors of the right shape, and nothing is sent."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def world(size: int) -> Iterator[None]:
    """Be rank 0 of a world of this size inside the context; the process must have no group."""
    # Importing it registers the backend.
    fakes = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fakes.FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_size(name: str) -> int:
    """Return the number of ranks of a group by its name."""
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    return int(groups._resolve_process_group(name).size())
