"""Weights that are loaded together: contiguous bytes on the host, and views of one place on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# A block with less than this share of its part's weights is not worth a copy.
_LEAST_SHARE = 0.002


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights."""
    return sum(tensor.nbytes for tensor in tensors_of(module))


def streamable(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a part that are worth copying one by one."""
    total = module_bytes(module)
    return [block for block in blocks if block is not module and module_bytes(block) >= _LEAST_SHARE * total]
