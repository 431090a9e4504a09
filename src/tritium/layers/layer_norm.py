"""Layer norm, alone and followed by the scale and shift of an adaptive norm."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import ada_norm

# High precision, fast, and half precision only. PyTorch's kernel is as precise as the first and as fast as the others.
IMPL_MODES = (0, 1, 2)


def fast_layernorm(norm: nn.LayerNorm, x: torch.Tensor, impl_mode: int = 0, fused: bool = True) -> torch.Tensor:
    """Return `norm(x)` in the dtype of x, even if the norm's weights have another dtype.

    Args:
        norm: The layer whose shape, weight, bias and eps are used.
        x: A tensor whose last dims are the layer's `normalized_shape`.
        impl_mode: 0, 1 or 2. All three give the exact result; 2 raises unless x and the weights are float16.
        fused: No effect: PyTorch has one kernel for both values.
    """
    _layer("norm", norm)
    checks.tensor("x", x)
    checks.boolean("fused", fused)
    if isinstance(impl_mode, bool) or not isinstance(impl_mode, int):
        raise ArgumentTypeError(f"impl_mode must be 0, 1 or 2, got {impl_mode!r}")
    if impl_mode not in IMPL_MODES:
        raise ArgumentError(f"impl_mode must be 0, 1 or 2, got {impl_mode}")
    weight, bias = norm.weight, norm.bias
    alike = (weight is None or weight.dtype == x.dtype) and (bias is None or bias.dtype == x.dtype)
    if not alike or impl_mode == 2 or torch.compiler.is_compiling():
        _check_layernorm(norm, x, impl_mode)
    if alike:
        try:
            # Under autocast the result is float32.
            return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)
        except (RuntimeError, TypeError, OverflowError):
            # PyTorch has checked the arguments already, so the check runs only after an error, for a clearer message.
            _check_layernorm(norm, x, impl_mode)
            raise
    wide = functools.reduce(torch.promote_types, (part.dtype for part in (x, weight, bias) if part is not None))
    wide_weight, wide_bias = (None if part is None else part.to(wide) for part in (weight, bias))
    return F.layer_norm(x.to(wide), norm.normalized_shape, wide_weight, wide_bias, norm.eps).to(x.dtype)


def _check_layernorm(norm: nn.LayerNorm, x: torch.Tensor, impl_mode: int) -> None:
    given = {name: part for name, part in (("x", x), ("weight", norm.weight), ("bias", norm.bias)) if part is not None}
    if impl_mode == 2 and any(part.dtype != torch.float16 for part in given.values()):
        listed = ", ".join(f"{name} is {part.dtype}" for name, part in given.items())
        raise ArgumentError(f"impl_mode 2 computes float16 alone: {listed}")
    shape = tuple(norm.normalized_shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ArgumentError(f"norm takes rows of shape {shape}, got x of shape {tuple(x.shape)}")
    _check_weights(shape, x, norm.weight, norm.bias, norm.eps)


def _check_weights(
    shape: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> None:
    """Check eps, weight and bias of a layer: user code may have replaced these attributes."""
    checks.number("the layer's eps", eps)
    for name, value in (("weight", weight), ("bias", bias)):
        checks.tensor(name, value, optional=True)
        checks.shape(name, value, shape)
    checks.numbers_of(x=x, weight=weight, bias=bias)
    checks.together(x=x, weight=weight, bias=bias)


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
    _layer("layernorm", layernorm)
    shape, weight, bias, eps = layernorm.normalized_shape, layernorm.weight, layernorm.bias, layernorm.eps
    return compute(_SCALE_SHIFT, fused, shape, x, weight, bias, scale, shift, eps)  # type: ignore[no-any-return]


def _check_scale_shift(
    fused: bool,
    shape: tuple[int, ...],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> None:
    for name, value in (("x", x), ("scale", scale), ("shift", shift)):
        checks.tensor(name, value)
    checks.boolean("fused", fused)
    checks.rank("x", x, 3)
    if tuple(shape) != (x.shape[-1],):
        raise ArgumentError(f"layernorm must norm the last dim of x, {x.shape[-1]} wide; its shape is {tuple(shape)}")
    _check_weights(tuple(shape), x, weight, bias, eps)
    checks.numbers_of(scale=scale, shift=shift)
    checks.together(x=x, scale=scale, shift=shift)
    _check_modulation("scale", scale, x)
    _check_modulation("shift", shift, x)


def _scale_shift_arguments(
    shape: tuple[int, ...],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[Any, ...]:
    del shape
    scale, shift = (value.unsqueeze(1) if value.dim() == 2 else value for value in (scale, shift))
    return x, weight, bias, scale, shift, float(eps), "layer", None


_SCALE_SHIFT = Layer(ada_norm.OP, _check_scale_shift, _scale_shift_arguments)


def _check_modulation(name: str, value: torch.Tensor, x: torch.Tensor) -> None:
    checks.rank(name, value, 2, 3)
    batch, tokens, width = x.shape
    if value.shape[0] != batch:
        raise ArgumentError(f"{name} must have the batch of x, {batch}, got shape {tuple(value.shape)}")
    if value.shape[-1] != width:
        raise ArgumentError(f"{name} must have the width of x, {width}, got shape {tuple(value.shape)}")
    if value.dim() == 3 and value.shape[1] not in (1, tokens):
        raise ArgumentError(f"{name} must have one row or one for each of {tokens} tokens, got {tuple(value.shape)}")


def _layer(name: str, value: Any) -> None:
    if not isinstance(value, nn.LayerNorm):
        raise ArgumentTypeError(f"{name} must be a torch.nn.LayerNorm, got {type(value).__name__}")
