"""Attention in 8 bits, in plain PyTorch: the definition of the providers `int8` and `fp8`, and the oracle of their tests.

    scores     (q * scale)(k - mean of k)^T with q and k in `dtype`: a scale per query, and one per TILE keys
    weights    exp2(scores - largest so far) * 2^8, rounded to float8_e4m3fn
    total      of the rounded weights: their rounding then moves a result by 2 to 4 dB less
    values     float8_e4m3fn with a scale per TILE keys, a power of two
    result     the sums of a tile in float32, added in float32 to those of earlier tiles

A softmax does not change when all keys are moved by one vector, and keys of trained models have large means. With `rotate`,
groups of columns of q and k are rotated by a regular Hadamard matrix, which does not change products either.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.quantize_rows import FP8, INT8, LARGEST, int8_scales, powers_of_two, rotated

# Keys with one scale. The kernel adds the sums of as many keys at a time.
TILE = 128

# Weights are rounded as multiples of 2^-8: the largest is 256, and the smallest that is not zero 2^-17.
RAISED = 8.0

# The largest magnitude of a tile of values counts as at least this: a tile of zeros gets no scale near zero, by which
# earlier sums are divided.
LEAST_VALUE = 2.0**-32


def rounded_rows(x: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x rounded to `dtype`, in float32, and its scales, for largest magnitudes that broadcast against x."""
    scale, inverse = powers_of_two(largest) if dtype == FP8 else int8_scales(largest)
    scaled = x * inverse
    if dtype == INT8:
        scaled = scaled.round()
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(torch.float32), scale


def in_tiles(x: torch.Tensor) -> torch.Tensor:
    """Return [B, N, S, D] as [B, N, tiles, TILE, D], padded with zeros."""
    batch, heads, tokens, width = x.shape
    padded = F.pad(x, (0, 0, 0, -tokens % TILE))
    return padded.reshape(batch, heads, padded.shape[2] // TILE, TILE, width)


def rounded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    rotate: int = 0,
    values: torch.dtype | None = FP8,
) -> torch.Tensor:
    """Compute attention of heads-first tensors by the arithmetic of the kernel; `values` None leaves them and weights as they are."""
    # Rounded to 16 bits again, in which the kernel rotates.
    moved = (k.to(torch.float32) - k.mean(2, keepdim=True, dtype=torch.float32)).to(k.dtype)
    wide_q, wide_k = (rotated(side.to(torch.float32), rotate) for side in (q, moved))
    rows, row_scale = rounded_rows(wide_q, dtype, wide_q.abs().amax(-1, keepdim=True))
    tiles = in_tiles(wide_k)
    keys, key_scale = rounded_rows(tiles, dtype, tiles.abs().amax((-2, -1), keepdim=True))
    value = in_tiles(v.to(torch.float32))
    value_scale = torch.ones_like(key_scale)
    if values is not None:
        value, value_scale = rounded_rows(
            value, values, value.abs().amax((-2, -1), keepdim=True).clamp(min=LEAST_VALUE)
        )
    row_scale = row_scale * (scale / math.log(2))
    largest = torch.full_like(row_scale, -math.inf)
    total, out = torch.zeros_like(row_scale), torch.zeros((*q.shape[:3], v.shape[3]), device=q.device)
    for tile in range(tiles.shape[2]):
        score = rows @ keys[:, :, tile].transpose(-2, -1) * (row_scale * key_scale[:, :, tile])
        score[..., max(0, k.shape[2] - tile * TILE) :] = -math.inf
        now = torch.maximum(largest, score.amax(-1, keepdim=True))
        weight, shrink = torch.exp2(score - (now - RAISED)), torch.exp2(largest - now)
        weight = weight.to(v.dtype if values is None else values).to(torch.float32)
        total = total * shrink + weight.sum(-1, keepdim=True)
        out = out * shrink + (weight @ value[:, :, tile]) * value_scale[:, :, tile]
        largest = now
    return (out / total).to(q.dtype)
