"""Rotary position embedding of a query or a key."""

from __future__ import annotations

from typing import Any

import torch

from tritium.errors import ArgumentError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import rope

# The names of pairings here, and the op's.
MODES = {"rotated_half": rope.HALF, "rotated_interleaved": rope.INTERLEAVED}


def rotary_position_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated_mode: str = "rotated_half",
    head_first: bool = False,
    fused: bool = True,
) -> torch.Tensor:
    """Rotate every pair of elements of a head by its angle, in float32, rounded to the dtype of `x`.

    Args:
        x: [B, S, N, D], or [B, N, S, D] with `head_first`; with 4-D tables also [S, B, N, D].
        cos: Cosines, [S, D], or 4-D and broadcastable to `x`. One value per element (D) or per pair (D / 2).
        sin: Sines of the same shape.
        rotated_mode: `rotated_half` pairs elements i and i + D / 2, `rotated_interleaved` pairs 2 i and 2 i + 1.
        head_first: Whether heads come before tokens.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    return compute(_LAYER, fused, x, cos, sin, rotated_mode, head_first)  # type: ignore[no-any-return]


def _check(
    fused: bool, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated_mode: str, head_first: bool
) -> None:
    for name, value in (("x", x), ("cos", cos), ("sin", sin)):
        checks.tensor(name, value)
    checks.text("rotated_mode", rotated_mode, tuple(MODES))
    checks.boolean("head_first", head_first)
    checks.boolean("fused", fused)
    checks.rank("x", x, 4)
    checks.rank("cos", cos, 2, 4)
    checks.rank("sin", sin, 2, 4)
    if cos.shape != sin.shape:
        raise ArgumentError(f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if x.shape[-1] % 2:
        raise ArgumentError(f"x must have heads of an even width to have pairs, got {x.shape[-1]}")
    checks.numbers_of(x=x, cos=cos, sin=sin)
    checks.together(x=x, cos=cos, sin=sin)
    if cos.dim() == 2:
        tokens = x.shape[2 if head_first else 1]
        if cos.shape[0] != tokens:
            raise ArgumentError(
                f"a 2-D table has a row for each token: got {cos.shape[0]} rows for {tokens} tokens of x "
                f"{tuple(x.shape)} with head_first={head_first}"
            )
    if cos.shape[-1] not in (x.shape[-1], x.shape[-1] // 2):
        raise ArgumentError(
            f"tables have a number for each element of a head ({x.shape[-1]}) or for each pair "
            f"({x.shape[-1] // 2}), got {cos.shape[-1]}"
        )
    if cos.dim() == 4 and any(own not in (1, size) for own, size in zip(cos.shape[:-1], x.shape[:-1], strict=True)):
        raise ArgumentError(f"a table of shape {tuple(cos.shape)} cannot be broadcast to {tuple(x.shape)}")


def _arguments(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotated_mode: str, head_first: bool
) -> tuple[Any, ...]:
    if cos.dim() == 2 and not head_first:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x, cos, sin, MODES[rotated_mode], False, None


_LAYER = Layer(rope.OP, _check, _arguments)
