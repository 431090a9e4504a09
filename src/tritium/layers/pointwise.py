"""Activations by name, and multiply by a number and add."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from tritium.errors import ArgumentError, nearest
from tritium.layers.arguments import checked
from tritium.ops import scaled_add


class FastGELU(nn.Module):
    """Compute `x * sigmoid(1.702 x)`, GELU with errors up to 0.021: lossy, so only used by name."""

    lossy = True

    @checked
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)

    def extra_repr(self) -> str:
        return "lossy: x * sigmoid(1.702 x)"


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "swish": nn.SiLU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "gelu-tanh": functools.partial(nn.GELU, approximate="tanh"),
    "gelu-fast": FastGELU,
}


@checked
def get_activation_layer(name: str) -> nn.Module:
    """Return a new module for an activation's name, upper or lower case.

    `gelu-fast` is a lossy approximation of GELU; all others are computed as they are defined.
    """
    if name.lower() not in ACTIVATIONS:
        raise ArgumentError(f"there is no activation {name!r}; {nearest(name.lower(), ACTIVATIONS)}")
    return ACTIVATIONS[name.lower()]()


@checked
def muls_add(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x * scale + y` as a new tensor, computed in float32, rounded once; x and y broadcast."""
    scale = float(scale)
    # On a CPU PyTorch's kernel first rounds the scale to half precision for tensors of half precision.
    is_exact = x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16)
    # It takes no scale outside of float32's range.
    is_exact = is_exact and x.dtype == y.dtype and abs(scale) <= torch.finfo(torch.float32).max
    if is_exact and not torch.compiler.is_compiling():
        return torch.add(y, x, alpha=scale)
    return scaled_add.reference(x, scale, y, None)
