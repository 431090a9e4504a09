"""Activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from tritium.layers import checks


class FastGELU(nn.Module):
    """Compute `x * sigmoid(1.702 x)`, GELU with errors up to 0.021: lossy, so only used by name."""

    lossy = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        checks.tensor("x", x)
        checks.numbers_of(x=x)
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


def get_activation_layer(name: str) -> nn.Module:
    """Return a new module for an activation's name, upper or lower case.

    `gelu-fast` is a lossy approximation of GELU; all others are computed as they are defined.
    """
    lowered = name.lower() if isinstance(name, str) else name
    checks.text("activation", lowered, tuple(ACTIVATIONS))
    return ACTIVATIONS[lowered]()
