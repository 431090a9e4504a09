"""Attention in 8 bits, in plain PyTorch: the definition of the provider `int8`, and the oracle of its kernels' tests.

    scores     (q * scale)(k - mean)^T with q and k in int8: a scale per query, and one per TILE keys
    weights    exp2(scores - largest) * 2^RAISED, rounded to float8_e4m3fn; half of the exponentials are approximated by lines
    total      of the rounded weights: their rounding then moves a result by 2 to 4 dB less
    values     float8_e4m3fn with a scale per channel of a head, a power of two
    result     sums in float32; tensor cores keep about 14 bits of them for some tiles, and the kernel adds these in float32

A softmax does not change when all keys are moved by one vector, and keys of trained models have large means. Groups of
columns of q and k are rotated by a regular Hadamard matrix, which does not change products either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.quantize_rows import FP8, INT8, LARGEST, ROTATIONS, int8_scales, powers_of_two, rotated

# Keys with one scale.
TILE = 128

# The largest score of a query counts until one exceeds it by LAZY: sums are then rarely scaled.
LAZY = 2.0

# Weights are raised by 2^RAISED, so by LAZY more at most: float8 holds 2^-9 to 448 = 2^8.8.
RAISED = 8.8 - LAZY

# Of 16 groups of weights, 16 keys of a tile and every second 8 queries, those whose exponentials are computed from lines:
# special units of a GPU compute the others meanwhile.
LINES = 8

# Queries that have the same exponentials computed from lines.
LINE_ROWS = 8

# The largest magnitude of a channel of values counts as at least this.
LEAST_VALUE = 2.0**-32


def rotation_of(width: int) -> int:
    """Return the columns of heads of a width that are rotated together.

    >>> rotation_of(128), rotation_of(40), rotation_of(63)
    (64, 4, 0)
    """
    return next((group for group in reversed(ROTATIONS[:4]) if group and width % group == 0), 0)


def in_int8(x: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x rounded to int8, in float32, and its scales, for largest magnitudes that broadcast against x."""
    scale, inverse = int8_scales(largest)
    return (x * inverse).round().clamp(-LARGEST[INT8], LARGEST[INT8]), scale


def in_float8(x: torch.Tensor) -> torch.Tensor:
    """Return x rounded to float8, in float32; larger numbers become the largest."""
    return x.clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8).to(torch.float32)


def by_lines(score: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return 2^(score - shift) in float16 without an exponential function; 0 below 2^-11, with errors of up to 1.5 %.

    The bits of a float16, as an integer, are 2^10 times its logarithm + 15, except that the mantissa is linear. The product
    of two numbers with half the logarithm, half a unit apart, is the result.
    """
    # 15 * 2^10, less half of what puts them half a unit apart, and less 55, which centers the error.
    bits = (score * 512 + (15049 - shift * 512).round()).clamp(min=9417).round().to(torch.int16)
    return bits.view(torch.float16) * (bits + 512).view(torch.float16)


def has_lines(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return [queries, keys], whether exponentials are computed from lines, for the first queries of a tile."""
    row, group = (torch.arange(size, device=device) // step for size, step in ((queries, LINE_ROWS), (keys, 16)))
    return (8 * (row[:, None] % 2) + group) * LINES % 16 < LINES


def in_tiles(x: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    """Return [B, N, S, D] as [B, N, tiles, TILE, D]: a tile begins at each edge, and is padded with zeros."""
    tiles = [F.pad(x[:, :, first:end], (0, 0, 0, TILE - (end - first))) for first, end in pairwise(edges)]
    return torch.stack(tiles, dim=2)


def edges_of(tokens: int) -> list[int]:
    """Return the edges of consecutive tiles.

    >>> edges_of(300)
    [0, 128, 256, 300]
    """
    return [*range(0, tokens, TILE), tokens]


def rounded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, rotate: int | None = None
) -> torch.Tensor:
    """Compute attention of heads-first tensors in 8 bits; `rotate` None is the rotation for the heads' width."""
    return rounded_tiles(q, k, v, scale, edges=([0, q.shape[2]], edges_of(k.shape[2])), rotate=rotate)


# For each sample, head and tile of queries, the tiles of keys that are visited, in order.
Visits = Sequence[Sequence[Sequence[Sequence[int]]]]


def rounded_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    edges: tuple[Sequence[int], Sequence[int]],
    visits: Visits | None = None,
    rotate: int | None = None,
) -> torch.Tensor:
    """Compute `rounded_attention` of tiles that begin at `edges` of queries and keys; `visits` None: all visit all keys.

    Queries that visit nothing have the result zero.
    """
    group = rotation_of(q.shape[3]) if rotate is None else rotate
    wide_q, wide_k, wide_v = (side.to(torch.float32) for side in (q, k, v))
    moved = wide_k - wide_k.mean(2, keepdim=True)
    wide_q, tiles = rotated(wide_q, group), in_tiles(rotated(moved, group), edges[1])
    rows, row_scale = in_int8(wide_q, wide_q.abs().amax(-1, keepdim=True))
    keys, key_scale = in_int8(tiles, tiles.abs().amax((-2, -1), keepdim=True))
    value_scale, inverse = powers_of_two(wide_v.abs().amax(2, keepdim=True).clamp(min=LEAST_VALUE))
    values = in_tiles(in_float8(wide_v * inverse), edges[1])
    row_scale = row_scale * (scale / math.log(2))
    sizes = [end - first for first, end in pairwise(edges[1])]
    if visits is None:
        stored = (rows, row_scale, keys, key_scale, values)
        return (_visited(*stored, range(len(sizes)), sizes) * value_scale).to(q.dtype)
    out = torch.zeros((*q.shape[:3], v.shape[3]), device=q.device)
    for sample, of_sample in enumerate(visits):
        for head, of_head in enumerate(of_sample):
            one = (slice(sample, sample + 1), slice(head, head + 1))
            for (first, end), listed in zip(pairwise(edges[0]), of_head, strict=True):
                if listed and first < end:
                    some = (*one, slice(first, end))
                    stored = (rows[some], row_scale[some], keys[one], key_scale[one], values[one])
                    out[some] = _visited(*stored, listed, sizes)
    return (out * value_scale).to(q.dtype)


def _visited(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    values: torch.Tensor,
    listed: Iterable[int],
    sizes: Sequence[int],
) -> torch.Tensor:
    """Return the mean of stored values by the weights of stored queries for the tiles in a list."""
    largest = torch.full_like(row_scale, -math.inf)
    total, out = torch.zeros_like(row_scale), torch.zeros((*rows.shape[:3], values.shape[4]), device=rows.device)
    from_lines = has_lines(rows.shape[2], TILE, rows.device)
    for tile in listed:
        score = rows @ keys[:, :, tile].transpose(-2, -1) * (row_scale * key_scale[:, :, tile])
        hidden = torch.arange(TILE, device=rows.device) >= sizes[tile]
        score = score.masked_fill(hidden, -math.inf)
        most = score.amax(-1, keepdim=True)
        now = torch.where(most > largest + LAZY, most, largest)
        shift, shrink = now - RAISED, torch.exp2(largest - now)
        weight = torch.where(from_lines, by_lines(score, shift).to(torch.float32), torch.exp2(score - shift))
        weight = in_float8(weight).masked_fill(hidden, 0)
        total = total * shrink + weight.sum(-1, keepdim=True)
        out = out * shrink + weight @ values[:, :, tile]
        largest = now
    return out / total
