"""Norms, alone and with the operations around them in models."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_broadcast, check_rank, check_shape, check_tensors, checked
from tritium.layers.eager import compute
from tritium.ops import ada_norm, rms_norm
from tritium.ops import group_norm_silu as group_norm
from tritium.ops import residual_norm_modulate as residual


class RMSNorm(nn.Module):
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dim in float32, rounded to x's dtype."""

    @checked
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    @checked
    def forward(self, x: torch.Tensor, if_fused: bool = True) -> torch.Tensor:
        check_tensors({"x": x, "weight": self.weight})
        if x.shape[-1:] != self.weight.shape:
            raise ArgumentError(f"x must have rows of {self.weight.shape[0]} numbers, got shape {tuple(x.shape)}")
        return compute(rms_norm.OP, if_fused, x, self.weight, float(self.eps), None)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@checked
def fast_layernorm(norm: nn.LayerNorm, x: torch.Tensor, impl_mode: int = 0, fused: bool = True) -> torch.Tensor:
    """Return `norm(x)` in the dtype of x, even if the norm's weights have another dtype.

    Args:
        norm: The layer whose shape, weight, bias and eps are used.
        x: A tensor whose last dims are the layer's `normalized_shape`.
        impl_mode: 0, 1 or 2. All three give the exact result; 2 raises unless x and the weights are float16.
        fused: No effect: PyTorch has one kernel for both values.
    """
    del fused
    parts = norm.weight, norm.bias
    dtypes = {tensor.dtype for tensor in (x, *parts) if tensor is not None}
    if impl_mode not in (0, 1, 2):
        raise ArgumentError(f"impl_mode must be 0, 1 or 2, got {impl_mode}")
    if impl_mode == 2 and dtypes != {torch.float16}:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise ArgumentError(f"impl_mode 2 takes x and weights in float16 alone, got {listed}")
    wide = functools.reduce(torch.promote_types, dtypes)
    weight, bias = (None if part is None else part.to(wide) for part in parts)
    # Under autocast the result is float32.
    return F.layer_norm(x.to(wide), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


@checked
def layernorm_scale_shift(
    layernorm: nn.LayerNorm, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, fused: bool = True
) -> torch.Tensor:
    """Return `layernorm(x) * (1 + scale) + shift`, computed in float32, rounded once to the dtype of x.

    Args:
        layernorm: A layer over the last dim, with or without weights.
        x: [B, S, H].
        scale: [B, H], [B, 1, H] or one row per token, [B, S, H].
        shift: Any of these shapes, independent of the shape of scale.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    check_rank("x", x, 3)
    shape, weight, bias = layernorm.normalized_shape, layernorm.weight, layernorm.bias
    if tuple(shape) != (x.shape[-1],):
        raise ArgumentError(f"layernorm must norm the last dim of x, {x.shape[-1]} wide; its shape is {tuple(shape)}")
    check_tensors({"x": x} | {name: value for name, value in (("weight", weight), ("bias", bias)) if value is not None})
    arguments = x, weight, bias, _rows("scale", scale, x), _rows("shift", shift, x), float(layernorm.eps), "layer", None
    return compute(ada_norm.OP, fused, *arguments)  # type: ignore[no-any-return]


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
    arguments = x, y, gate, weight, bias, scale, shift, float(eps), norm, None, None
    return compute(residual.OP, fused, *arguments)  # type: ignore[no-any-return]


def _rows(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Insert a token dim into [B, H], which has one row per sample; raise if the tensor cannot be broadcast to x."""
    if value is None:
        return None
    if value.dim() == 2 and x.dim() == 3:
        value = value.unsqueeze(1)
    check_broadcast(name, value, tuple(x.shape))
    return value


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
    return compute(group_norm.OP, fused, x, groups, weight, bias, float(eps), None)  # type: ignore[no-any-return]
