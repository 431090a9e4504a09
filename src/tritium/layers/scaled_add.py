"""A product with a number and a sum."""

from __future__ import annotations

import torch

from tritium.errors import ArgumentError
from tritium.layers import checks
from tritium.ops import scaled_add


def muls_add(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale + y`, in float32, rounded once; x and y are broadcast against each other and stay as they are."""
    checks.tensor("x", x)
    checks.tensor("y", y)
    checks.number("scale", scale)
    checks.numbers_of("x", x)
    checks.numbers_of("y", y)
    checks.together(x=x, y=y)
    if x.shape != y.shape:
        try:
            torch.broadcast_shapes(x.shape, y.shape)
        except RuntimeError as error:
            raise ArgumentError(
                f"x {tuple(x.shape)} and y {tuple(y.shape)} cannot be broadcast to one shape"
            ) from error
    if x.dtype == y.dtype and not torch.compiler.is_compiling():
        # PyTorch has a kernel for it, which computes half precision in float32 as well.
        return torch.add(y, x, alpha=float(scale))
    return scaled_add.reference(x, float(scale), y, None)
