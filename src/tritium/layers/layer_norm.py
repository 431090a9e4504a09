"""Layer norm, alone and followed by the scale and shift of an adaptive norm."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_rank, check_shape, check_tensors, checked
from tritium.layers.eager import compute
from tritium.ops import ada_norm


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
    shape, weight, bias = norm.normalized_shape, norm.weight, norm.bias
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if impl_mode not in (0, 1, 2):
        raise ArgumentError(f"impl_mode must be 0, 1 or 2, got {impl_mode}")
    if impl_mode == 2 and dtypes != {torch.float16}:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise ArgumentError(f"impl_mode 2 takes x and weights in float16 alone, got {listed}")
    if x.shape[-len(shape) :] != shape:
        raise ArgumentError(f"norm takes rows of shape {shape}, got x of shape {tuple(x.shape)}")
    if len(dtypes) > 1:
        wide = functools.reduce(torch.promote_types, dtypes)
        wide_weight, wide_bias = (None if part is None else part.to(wide) for part in (weight, bias))
        return F.layer_norm(x.to(wide), shape, wide_weight, wide_bias, norm.eps).to(x.dtype)
    # Under autocast the result is float32.
    return F.layer_norm(x, shape, weight, bias, norm.eps).to(x.dtype)


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
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check_shape(name, value, tuple(shape))
            check_tensors({"x": x, name: value})
    scale, shift = (_modulation(name, value, x) for name, value in (("scale", scale), ("shift", shift)))
    return compute(ada_norm.OP, fused, x, weight, bias, scale, shift, float(layernorm.eps), "layer", None)  # type: ignore[no-any-return]


def _modulation(name: str, value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a modulation as [B, 1 or S, H]."""
    check_rank(name, value, 2, 3)
    value = value.unsqueeze(1) if value.dim() == 2 else value
    batch, tokens, width = x.shape
    if value.shape[0] != batch or value.shape[1] not in (1, tokens) or value.shape[2] != width:
        raise ArgumentError(
            f"{name} must be [B, H], [B, 1, H] or [B, S, H] for x {tuple(x.shape)}, got {tuple(value.shape)}"
        )
    return value
