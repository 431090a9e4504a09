"""The norm and activation in front of a convolution."""

from __future__ import annotations

import math

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_shape, checked
from tritium.layers.eager import compute
from tritium.ops import group_norm_silu as op


@checked
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
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        raise ArgumentError(f"x must be [B, C, ...] with C divisible by groups={groups}, got {tuple(x.shape)}")
    # As in PyTorch, which counts the whole batch.
    if x.shape[0] * x.shape[1] // groups * math.prod(x.shape[2:]) == 1:
        raise ArgumentError(f"the norm of one number is not defined: got groups={groups} of x {tuple(x.shape)}")
    check_shape("weight", weight, (x.shape[1],))
    check_shape("bias", bias, (x.shape[1],))
    return compute(op.OP, fused, x, groups, weight, bias, float(eps), None)  # type: ignore[no-any-return]
