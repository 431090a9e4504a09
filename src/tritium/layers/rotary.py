"""Rotary position embedding of a query or a key."""

from __future__ import annotations

from typing import Literal

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_broadcast, check_rank, checked
from tritium.layers.eager import compute
from tritium.ops import rope

# The names of pairings here, and the op's.
MODES = {"rotated_half": rope.HALF, "rotated_interleaved": rope.INTERLEAVED}


@checked
def rotary_position_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated_mode: Literal["rotated_half", "rotated_interleaved"] = "rotated_half",
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
    check_rank("x", x, 4)
    check_rank("cos", cos, 2, 4)
    if cos.shape != sin.shape:
        raise ArgumentError(f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    width, tokens = x.shape[-1], x.shape[2 if head_first else 1]
    if width % 2 or cos.shape[-1] not in (width, width // 2):
        raise ArgumentError(
            f"heads of an even width D need tables of D or D / 2 columns, got {cos.shape[-1]} columns for D = {width}"
        )
    if cos.dim() == 2 and cos.shape[0] != tokens:
        raise ArgumentError(
            f"a 2-D table has a row for each token: got {cos.shape[0]} rows for {tokens} tokens of x "
            f"{tuple(x.shape)} with head_first={head_first}"
        )
    if cos.dim() == 2 and not head_first:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    check_broadcast("cos", cos[..., :1], tuple(x.shape))
    return compute(rope.OP, fused, x, cos, sin, MODES[rotated_mode], False, None)  # type: ignore[no-any-return]
