"""Attention as it is defined: the reference for all candidates, and a candidate for the CPU."""

from __future__ import annotations

import math

import torch

from tritium.errors import ArgumentError

# The bytes of scores that `chunked` holds at once.
CHUNK_BYTES = 64 << 20


def with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return a query and a scale above 0 for the same attention.

    Kernels take the largest score before they scale it, and mask keys with -inf: both need a positive scale.
    """
    if scale > 0:
        return q, scale
    if scale < 0:
        return -q, -scale
    if scale == 0:
        return q * 0, 1.0
    raise ArgumentError(f"scale must be a number, got {scale}")


def attention_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    *,
    first_row: int = 0,
    wide: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `softmax(q k^T * scale, masked) v` of heads-first tensors.

    It is computed in float32 (float64 for float64) and rounded once.

    Causality is aligned to the first key, as in F.scaled_dot_product_attention. A row without a visible key gives zeros.
    `first_row` is the index of the first query if q is a slice of all queries.
    """
    wide = wide or torch.promote_types(q.dtype, torch.float32)
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + first_row
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    if mask is None:
        return (torch.softmax(scores, dim=-1) @ v.to(wide)).to(q.dtype)
    # Fill such rows before the softmax too: it would return NaN for them, and their gradients would be NaN.
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), dim=-1).masked_fill(unseen, 0.0)
    return (weights @ v.to(wide)).to(q.dtype)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """Compute `attention_math` for a few queries at a time, so that memory never holds all scores."""
    batch, heads, queries, _ = q.shape
    rows = max(1, CHUNK_BYTES // max(1, 4 * batch * heads * k.shape[2]))
    done = []
    for start in range(0, max(queries, 1), rows):
        some = slice(start, start + rows)
        part = mask[:, :, some] if mask is not None and mask.shape[2] > 1 else mask
        done.append(attention_math(q[:, :, some], k, v, part, scale, causal, first_row=start))
    return torch.cat(done, dim=2)
