"""Multiply by a number and add."""

from __future__ import annotations

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import checked
from tritium.ops import scaled_add

# The largest scale that PyTorch's kernel takes.
LARGEST = torch.finfo(torch.float32).max


@checked
def muls_add(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x * scale + y` as a new tensor, computed in float32, rounded once; x and y broadcast."""
    if x.shape != y.shape:
        try:
            torch.broadcast_shapes(x.shape, y.shape)
        except RuntimeError as error:
            raise ArgumentError(
                f"x {tuple(x.shape)} and y {tuple(y.shape)} cannot be broadcast to one shape"
            ) from error
    scale = float(scale)
    # On a CPU PyTorch's kernel first rounds the scale to half precision for tensors of half precision.
    exact = x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16)
    if exact and x.dtype == y.dtype and not torch.compiler.is_compiling() and abs(scale) <= LARGEST:
        return torch.add(y, x, alpha=scale)
    return scaled_add.reference(x, scale, y, None)
