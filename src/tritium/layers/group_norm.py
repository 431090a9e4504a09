"""The norm and activation in front of a convolution."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import group_norm_silu as op


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    fused: bool = True,
) -> torch.Tensor:
    """Return `silu(group_norm(x))`, computed in float32, rounded once, in the memory format of x.

    Args:
        x: [B, C, ...], channels last or contiguous.
        groups: How many groups the channels are divided into.
        weight: [C] or None.
        bias: [C] or None.
        eps: A small number that avoids division by zero in the norm.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    return compute(_LAYER, fused, x, groups, weight, bias, eps)  # type: ignore[no-any-return]


def _check(
    fused: bool, x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> None:
    checks.tensor("x", x)
    checks.number("eps", eps)
    checks.boolean("fused", fused)
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise ArgumentTypeError(f"groups must be a whole number, got {groups!r}")
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise ArgumentError(f"x must be [B, C, ...] with C divisible by groups={groups}, got {tuple(x.shape)}")
    if x.shape[0] * x.shape[1] // groups * math.prod(x.shape[2:]) == 1:
        raise ArgumentError(f"there must be more than one number to norm, got groups={groups} of x {tuple(x.shape)}")
    for name, value in (("weight", weight), ("bias", bias)):
        checks.tensor(name, value, optional=True)
        checks.shape(name, value, (x.shape[1],))
    checks.numbers_of(x=x, weight=weight, bias=bias)
    checks.together(x=x, weight=weight, bias=bias)


def _arguments(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[Any, ...]:
    return x, groups, weight, bias, float(eps), None


_LAYER = Layer(op.OP, _check, _arguments)
