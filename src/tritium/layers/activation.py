"""Activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from tritium.errors import ArgumentError, nearest
from tritium.layers.arguments import checked


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
