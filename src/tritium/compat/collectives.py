"""Collectives that Dynamo traces into graphs as operators, named by their process group."""

from __future__ import annotations

from typing import Any

import torch


def all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group, given its name; the tensor stays as it is."""
    ops: Any = torch.ops._c10d_functional
    total: torch.Tensor = ops.wait_tensor(ops.all_reduce(tensor, "sum", group))
    return total


def name_of(group: Any) -> str:
    """Return the name of a process group, which is equal on all of its ranks."""
    return str(group.group_name)
