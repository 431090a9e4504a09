"""The residual of a block, its norm and its modulation."""

from __future__ import annotations

import torch

from tritium.errors import ArgumentError
from tritium.layers import checks
from tritium.layers.compute import compute
from tritium.ops import residual_norm_modulate as op


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
    """`r = x + gate * y` and `norm(r) * (1 + scale) + shift`: both, in one pass over memory.

    Args:
        x: The stream, [..., H].
        y: What a layer adds to it, of the same shape.
        gate: Broadcastable to x, as are scale and shift; [B, H] for x of [B, S, H] is one row a sample.
        scale: None for no scale.
        shift: None for no shift.
        norm: `layer` or `rms`.
        weight: The norm's own weight, [H], or None.
        bias: The norm's own bias, [H], or None.
        eps: What keeps the norm from dividing by zero.
        fused: Whether a kernel of its own may compute it.
    """
    checks.tensor("x", x)
    checks.tensor("y", y)
    checks.numbers_of("x", x)
    if x.shape != y.shape or x.dim() == 0:
        raise ArgumentError(f"x and y must have one shape [..., H], got {tuple(x.shape)} and {tuple(y.shape)}")
    checks.text("norm", norm, op.NORMS)
    checks.number("eps", eps)
    checks.boolean("fused", fused)
    for name, value in (("weight", weight), ("bias", bias)):
        checks.tensor(name, value, optional=True)
        if value is not None and tuple(value.shape) != (x.shape[-1],):
            raise ArgumentError(f"{name} must have shape ({x.shape[-1]},), got {tuple(value.shape)}")
    gate, scale, shift = (_row(n, v, x) for n, v in (("gate", gate), ("scale", scale), ("shift", shift)))
    checks.together(x=x, y=y, gate=gate, scale=scale, shift=shift, weight=weight, bias=bias)
    arguments = (x, y, gate, weight, bias, scale, shift, eps, norm, None, None)
    return compute(op.OP, fused, *arguments)  # type: ignore[no-any-return]


def _row(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    checks.tensor(name, value, optional=True)
    if value is None:
        return None
    if value.dim() == 2 and x.dim() == 3:
        value = value.unsqueeze(1)
    checks.broadcastable(name, value, tuple(x.shape))
    return value
