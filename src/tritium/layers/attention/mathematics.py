"""Attention as it is defined: the reference of everything in this folder, and its own candidate for a CPU."""

from __future__ import annotations

import math

import torch

from tritium.errors import ArgumentError

# Scores of this many bytes are held at once by `chunked`.
CHUNK_BYTES = 64 << 20


def with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same attention with a scale above 0. Kernels take the largest score before they scale, and hide keys with -inf."""
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
    """`softmax(q k^T * scale, masked) v` over heads-first tensors, in float32 (float64 for float64), rounded once.

    Causality is aligned to the first key, as that of F.scaled_dot_product_attention. A row without a key gives zeros.
    `first_row` is the number of the first query, where q has some rows of more.
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
    # Before the softmax as well, which would make no numbers of such a row, and gradients of these.
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), dim=-1).masked_fill(unseen, 0.0)
    return (weights @ v.to(wide)).to(q.dtype)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """`attention_math` over some queries at a time, so that the scores of all of them are never in memory."""
    batch, heads, queries, _ = q.shape
    rows = max(1, CHUNK_BYTES // max(1, 4 * batch * heads * k.shape[2]))
    done = []
    for start in range(0, max(queries, 1), rows):
        some = slice(start, start + rows)
        part = mask[:, :, some] if mask is not None and mask.shape[2] > 1 else mask
        done.append(attention_math(q[:, :, some], k, v, part, scale, causal, first_row=start))
    return torch.cat(done, dim=2)
