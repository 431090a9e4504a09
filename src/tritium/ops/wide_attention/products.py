"""`wide_attention` as two matrix products around a softmax, some queries at a time.

    scores  = q k^T               float32, never rounded to half precision
    weights = softmax(scores)     half precision, as flash kernels have them
    out     = weights v

Kernels that keep no scores stop at heads of 256, and beyond that PyTorch has one for older GPUs alone. Products reach
what tensor cores can do; what they cost instead is the way of scores and weights through memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from tritium.compat.products import multiply_into, wide_product_obstacle
from tritium.ops import launch, rows
from tritium.ops.op import present
from tritium.ops.wide_attention.reference import fake

HALF = (torch.float16, torch.bfloat16)

# The widest heads of the kernels that keep no scores: PyTorch's flash and cuDNN.
WIDEST_FLASH = 256

# Scores of this many bytes are held at once: 4,096 queries of 16,384 keys, enough for products that fill a GPU.
SCORES_BYTES = 256 << 20

# Queries that are taken at once are a multiple of this where that is possible: the rows of a product's tile.
TILE_ROWS = 128

# Rows begin at a multiple of this many numbers: 16-byte accesses, in the softmax and in the products.
ALIGNED = 16

# A row of scores this long fits the registers of one program of 32 warps; longer ones are read twice.
WHOLE_ROW = 32_768

# Numbers that one program reads at a time from longer rows.
PART_OF_ROW = 8_192


@functools.cache
def _kernel() -> Any:
    import triton.language as tl

    @rows.jit
    def softmax_rows_kernel(  # type: ignore[no-untyped-def]
        scores_ptr, out_ptr, scale, keys, padded, TILE: tl.constexpr, WHOLE: tl.constexpr
    ):
        """Weights of a row of scores; `scale` has the logarithm of 2 in it. What pads a row gets no weight."""
        # 64 bits: rows times keys passes 2^31.
        row = tl.program_id(0).to(tl.int64) * padded
        scores = scores_ptr + row
        out = out_ptr + row
        lanes = tl.arange(0, TILE)
        # Loads and stores are bounded by the padded length, which is aligned where the number of keys may not be.
        if WHOLE:
            score = tl.load(scores + lanes, mask=lanes < padded, other=0.0) * scale
            score = tl.where(lanes < keys, score, float("-inf"))
            weight = tl.exp2(score - tl.max(score, 0))
            weight = weight * (1.0 / tl.sum(weight, 0))
            tl.store(out + lanes, weight.to(out_ptr.dtype.element_ty), mask=lanes < padded)
        else:
            # The first part of a longer row is full, so a maximum is a number from there on.
            largest = tl.max(tl.load(scores + lanes) * scale, 0)
            total = tl.zeros([TILE], tl.float32)
            for start in range(0, keys, TILE):
                places = start + lanes
                score = tl.load(scores + places, mask=places < padded, other=0.0) * scale
                score = tl.where(places < keys, score, float("-inf"))
                now = tl.maximum(largest, tl.max(score, 0))
                total = total * tl.exp2(largest - now) + tl.exp2(score - now)
                largest = now
            inverse = 1.0 / tl.sum(total, 0)
            for start in range(0, keys, TILE):
                places = start + lanes
                score = tl.load(scores + places, mask=places < padded, other=0.0) * scale
                score = tl.where(places < keys, score, float("-inf"))
                weight = tl.exp2(score - largest) * inverse
                tl.store(out + places, weight.to(out_ptr.dtype.element_ty), mask=places < padded)

    return softmax_rows_kernel


def launch_options(padded: int) -> dict[str, int | bool]:
    """How a row of a padded length is cut: 32 numbers a thread where one program holds it."""
    if padded > WHOLE_ROW:
        return {"TILE": PART_OF_ROW, "WHOLE": False, "num_warps": 16}
    tile = 1 << max(5, (padded - 1).bit_length())
    return {"TILE": tile, "WHOLE": True, "num_warps": min(32, max(4, tile // 1024))}


@launch.remembered
def softmax_rows(scores: torch.Tensor, out: torch.Tensor, keys: int, scale: float) -> None:
    """`softmax(scores * scale)` over the first `keys` columns; both [N, M, padded] and contiguous."""
    padded = scores.shape[-1]
    grid = (scores.shape[0] * scores.shape[1],)
    launch.start(_kernel(), grid, scores, out, scale * math.log2(math.e), keys, padded, **launch_options(padded))


def pieces(matrices: int, queries: int, room: int) -> Iterator[tuple[slice, slice]]:
    """Which matrices and which of their rows are taken at once, where there is room for so many rows of scores.

    >>> [(one.start, one.stop, some.start, some.stop) for one, some in pieces(3, 10, 20)]
    [(0, 2, 0, 10), (2, 3, 0, 10)]
    >>> [(one.start, one.stop, some.start, some.stop) for one, some in pieces(1, 1000, 400)]
    [(0, 1, 0, 384), (0, 1, 384, 768), (0, 1, 768, 1000)]
    """
    if room >= queries:
        at_once = room // queries
        for first in range(0, matrices, at_once):
            yield slice(first, min(first + at_once, matrices)), slice(0, queries)
        return
    # As few pieces as there is room for, of about one size, in whole tiles.
    size = -(-queries // -(-queries // max(1, room)))
    whole = -(-size // TILE_ROWS) * TILE_ROWS
    size = whole if whole <= room else max(size, room // TILE_ROWS * TILE_ROWS)
    for number in range(matrices):
        for first in range(0, queries, size):
            yield slice(number, number + 1), slice(first, min(first + size, queries))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """The attention of heads-first q, k and v into `out`, whose numbers of a head must lie together."""
    queries, keys = q.shape[2], k.shape[2]
    if out.numel() == 0:
        return
    if keys == 0:
        out.zero_()
        return
    padded = -(-keys // ALIGNED) * ALIGNED
    room = max(1, SCORES_BYTES // (4 * padded))
    # At most so many matrices are one batch of strided products.
    matrices = q.shape[0] if q.shape[1] == 1 else q.shape[1]
    taken = list(pieces(matrices, queries, room))
    shapes = [(one.stop - one.start, some.stop - some.start, padded) for one, some in taken]
    # The first is as large as any.
    scores = torch.empty(shapes[0], dtype=torch.float32, device=q.device)
    weights = torch.empty(shapes[0], dtype=q.dtype, device=q.device)
    for own_q, own_k, own_v, own_out in _matrices(*(_rows_of(tensor) for tensor in (q, k, v)), out):
        if len(taken) == 1 and padded == keys:
            # Nothing to cut: small products take the device less time than a dozen views take the host.
            multiply_into(own_q, own_k.transpose(1, 2), scores)
            softmax_rows(scores, weights, keys, float(scale))
            multiply_into(weights, own_v, own_out)
            continue
        for (one, some), shape in zip(taken, shapes, strict=True):
            score, weight = (_first_of(buffer, shape) for buffer in (scores, weights))
            multiply_into(own_q[one, some], own_k[one].transpose(1, 2), score[..., :keys])
            softmax_rows(score, weight, keys, float(scale))
            multiply_into(weight[..., :keys], own_v[one], own_out[one, some])


def _first_of(buffer: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    return buffer if buffer.shape == shape else buffer.view(-1)[: math.prod(shape)].view(shape)


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its rows lie apart and each is in one piece: a product would copy it in every step else."""
    dense = tensor.stride(3) == 1 and (tensor.shape[2] == 1 or tensor.stride(2) >= tensor.shape[3])
    return tensor if dense else tensor.contiguous()


def _matrices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Heads-first tensors as views [matrices, tokens, width]: all samples at once, or all heads of each sample."""
    if tensors[0].shape[1] == 1:
        yield tuple(tensor.squeeze(1) for tensor in tensors)
    else:
        yield from zip(*(tensor.unbind(0) for tensor in tensors), strict=True)


def run_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out = fake(q, k, v, scale)
    attend(q, k, v, scale, out)
    return out


def decline_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> str | None:
    del scale
    if {q.dtype, k.dtype, v.dtype} not in [{dtype} for dtype in HALF]:
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if present(q.shape[3]) <= WIDEST_FLASH:
        return f"for heads of up to {WIDEST_FLASH} there are kernels that keep no scores"
    return launch.cannot_launch(q, k, v) or wide_product_obstacle()
