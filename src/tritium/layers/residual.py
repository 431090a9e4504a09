"""The residual of a block, its norm and its modulation."""

from __future__ import annotations

from typing import Any

import torch

from tritium.errors import ArgumentError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import residual_norm_modulate as op

# A factor or summand that is broadcast over rows, or None.
Row = torch.Tensor | None


def residual_norm_modulate(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *,
    norm: str = "layer",
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
    return compute(_LAYER, fused, x, y, gate, weight, bias, scale, shift, eps, norm)  # type: ignore[no-any-return]


def _check(
    fused: bool,
    x: torch.Tensor,
    y: torch.Tensor,
    gate: Row,
    weight: Row,
    bias: Row,
    scale: Row,
    shift: Row,
    eps: float,
    norm: str,
) -> None:
    checks.tensor("x", x)
    checks.tensor("y", y)
    if x.shape != y.shape or x.dim() == 0:
        raise ArgumentError(f"x and y must have one shape [..., H], got {tuple(x.shape)} and {tuple(y.shape)}")
    checks.text("norm", norm, op.NORMS)
    checks.number("eps", eps)
    checks.boolean("fused", fused)
    for name, value in (("weight", weight), ("bias", bias)):
        checks.tensor(name, value, optional=True)
        checks.shape(name, value, (x.shape[-1],))
    for name, value in (("gate", gate), ("scale", scale), ("shift", shift)):
        checks.tensor(name, value, optional=True)
        if value is not None:
            checks.broadcastable(name, _rows(value, x), tuple(x.shape))
    checks.numbers_of(x=x, y=y, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)
    checks.together(x=x, y=y, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)


def _arguments(
    x: torch.Tensor, y: torch.Tensor, gate: Row, weight: Row, bias: Row, scale: Row, shift: Row, eps: float, norm: str
) -> tuple[Any, ...]:
    gate, scale, shift = (None if value is None else _rows(value, x) for value in (gate, scale, shift))
    return x, y, gate, weight, bias, scale, shift, float(eps), norm, None, None


def _rows(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Insert a token dim into [B, H], which has one row per sample."""
    return value.unsqueeze(1) if value.dim() == 2 and x.dim() == 3 else value


_LAYER = Layer(op.OP, _check, _arguments)
