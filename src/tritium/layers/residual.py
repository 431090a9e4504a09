"""The residual of a block, its norm and its modulation."""

from __future__ import annotations

from typing import Literal

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_broadcast, check_shape, checked
from tritium.layers.eager import compute
from tritium.ops import residual_norm_modulate as op


@checked
def residual_norm_modulate(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *,
    norm: Literal["layer", "rms"] = "layer",
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    fused: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `r = x + gate * y` and `norm(r) * (1 + scale) + shift`, computed in one pass over memory.

    Args:
        x: The residual stream, [..., H].
        y: The result of a layer, of the same shape.
        gate: Broadcastable to x, as are scale and shift; [B, H] for x of [B, S, H] is one row per sample.
        scale: None for no scale.
        shift: None for no shift.
        norm: `layer` or `rms`.
        weight: The norm's weight, [H], or None.
        bias: The norm's bias, [H], or None.
        eps: A small number that avoids division by zero in the norm.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    if x.shape != y.shape or x.dim() == 0:
        raise ArgumentError(f"x and y must have one shape [..., H], got {tuple(x.shape)} and {tuple(y.shape)}")
    check_shape("weight", weight, (x.shape[-1],))
    check_shape("bias", bias, (x.shape[-1],))
    gate, scale, shift = (_rows(name, value, x) for name, value in (("gate", gate), ("scale", scale), ("shift", shift)))
    return compute(op.OP, fused, x, y, gate, weight, bias, scale, shift, float(eps), norm, None, None)  # type: ignore[no-any-return]


def _rows(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Insert a token dim into [B, H], which has one row per sample; raise if the tensor cannot be broadcast to x."""
    if value is None:
        return None
    if value.dim() == 2 and x.dim() == 3:
        value = value.unsqueeze(1)
    check_broadcast(name, value, tuple(x.shape))
    return value
