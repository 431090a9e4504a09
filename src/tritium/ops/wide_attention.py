"""`softmax(q k^T * scale) v` for heads too wide for flash kernels: the head of 512 in an image VAE.

Tensors are heads-first, [B, N, S, D], without mask, causality or gradient. The result has the strides of PyTorch's
memory-efficient kernel: the heads of a token are adjacent.

The provider `products` computes two matrix products around a softmax, some queries at a time:

    scores  = q k^T               float32, never rounded to half precision
    weights = softmax(scores)     half precision, as flash kernels have them
    out     = weights v

Kernels that do not store scores take heads up to 256; for wider ones PyTorch has only a kernel made for older GPUs.
Products run at the full rate of tensor cores, but scores and weights pass through memory.

Generated code calls the op as an operator: the number of products depends on sizes, which may be dynamic, and they write
into slices of the result. The op takes milliseconds, the call a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.compat.operators import multiply_into
from tritium.ops.op import NARROW, Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave, present
from tritium.ops.triton_launch import decline_tensors, launch

HALF = (torch.float16, torch.bfloat16)

# The widest heads of the kernels that do not store scores: PyTorch's flash and cuDNN.
WIDEST_FLASH = 256

# The bytes of scores held at once: 4,096 queries of 16,384 keys, enough for products that fill a GPU.
SCORES_BYTES = 256 << 20

# The queries of a piece are a multiple of this if possible: the rows of a product's tile.
TILE_ROWS = 128

# Rows start at a multiple of this many elements, for 16-byte accesses in the softmax and the products.
ALIGNED = 16

# The longest row of scores that fits in the registers of one program of 32 warps; longer ones are read twice.
WHOLE_ROW = 32_768

# Elements that one program reads at a time from longer rows.
PART_OF_ROW = 8_192


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    promised = empty_result(q, v)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def empty_result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Allocate the result for heads-first q and v, with the heads of a token adjacent in memory."""
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)


def arguments(
    draw: Draw, queries: int, keys: int, width: int = 512, heads: int = 1, batch: int = 1, scale: float | None = None
) -> dict[str, Any]:
    sides = {"q": queries, "k": keys, "v": keys}
    given = {name: draw(batch, tokens, heads, width).transpose(1, 2) for name, tokens in sides.items()}
    return {**given, "scale": width**-0.5 if scale is None else scale}


def draw_samples(draw: Draw) -> Samples:
    yield "a VAE's middle", arguments(draw, 64, 64)
    yield "one token", arguments(draw, 1, 1)
    yield "odd sizes", arguments(draw, 63, 100)
    yield "several samples", arguments(draw, 7, 63, batch=3)
    yield "several heads", arguments(draw, 63, 7, 320, heads=2)
    yield "samples and heads", arguments(draw, 7, 100, 264, heads=3, batch=2)
    yield "narrow heads", arguments(draw, 63, 100, 64, heads=2)
    yield "a negative scale", arguments(draw, 7, 60, scale=-0.1)
    # Few keys have almost all the weight.
    yield "a large scale", arguments(draw, 7, 60, 264, scale=0.2)
    yield "many queries", arguments(draw, 3072, 60, 320)
    yield "many keys", arguments(draw, 7, 5120, 320)
    yield "no queries", arguments(draw, 0, 7)
    yield "no samples", arguments(draw, 7, 7, batch=0)
    one = draw(1, 1, 63, 320).expand(3, 1, 63, 320)
    for label, sides in (
        ("heads first in memory", [draw(2, 2, 63, 320) for _ in "qkv"]),
        ("an odd width", [draw(1, 2, 7, 261), draw(1, 2, 7, 261), draw(1, 2, 7, 63)]),
        ("columns far apart", [draw(1, 1, 320, tokens).transpose(2, 3) for tokens in (60, 63, 63)]),
        ("keys shared by samples", [draw(3, 1, 7, 320), one, one]),
    ):
        yield label, {**dict(zip("qkv", sides, strict=True)), "scale": 0.05}


def launch_options(padded: int) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Return the tiling of rows of a padded length, and Triton's options.

    A program that holds a whole row has 32 elements per thread.
    """
    if padded > WHOLE_ROW:
        return {"TILE": PART_OF_ROW, "WHOLE": False}, {"num_warps": 16}
    tile = 1 << max(5, (padded - 1).bit_length())
    return {"TILE": tile, "WHOLE": True}, {"num_warps": min(32, max(4, tile // 1024))}


def softmax_rows(scores: torch.Tensor, out: torch.Tensor, keys: int, scale: float) -> None:
    """Write `softmax(scores * scale)` over the first `keys` columns to `out`; both are contiguous [N, M, padded]."""
    from tritium.ops.kernels.softmax_rows import softmax_rows_kernel

    rows, padded = scores.shape[0] * scores.shape[1], scores.shape[-1]
    cut, options = launch_options(padded)
    launch(softmax_rows_kernel, (rows,), scores, out, scale * math.log2(math.e), keys, padded, options=options, **cut)


def pieces(matrices: int, queries: int, room: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of matrices and of their rows with at most `room` rows of scores each.

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
    # As few pieces as possible, of similar size, in whole tiles.
    size = -(-queries // -(-queries // max(1, room)))
    whole = -(-size // TILE_ROWS) * TILE_ROWS
    size = whole if whole <= room else max(size, room // TILE_ROWS * TILE_ROWS)
    for number in range(matrices):
        for first in range(0, queries, size):
            yield slice(number, number + 1), slice(first, min(first + size, queries))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write the attention of heads-first q, k and v to `out`, which is contiguous within a head."""
    queries, keys = q.shape[2], k.shape[2]
    if out.numel() == 0:
        return
    if keys == 0:
        out.zero_()
        return
    padded = -(-keys // ALIGNED) * ALIGNED
    room = max(1, SCORES_BYTES // (4 * padded))
    # The most matrices in one batched product.
    matrices = q.shape[0] if q.shape[1] == 1 else q.shape[1]
    taken = list(pieces(matrices, queries, room))
    shapes = [(one.stop - one.start, some.stop - some.start, padded) for one, some in taken]
    # The first piece is the largest.
    scores = torch.empty(shapes[0], dtype=torch.float32, device=q.device)
    weights = torch.empty(shapes[0], dtype=q.dtype, device=q.device)
    for own_q, own_k, own_v, own_out in _matrices(*(_rows_of(tensor) for tensor in (q, k, v)), out):
        if len(taken) == 1 and padded == keys:
            # One piece: make no views, since a dozen views can take the host longer than small products take the device.
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
    """Return the tensor, copied unless its rows are contiguous and disjoint: every product would copy it."""
    dense = tensor.stride(3) == 1 and (tensor.shape[2] == 1 or tensor.stride(2) >= tensor.shape[3])
    return tensor if dense else tensor.contiguous()


def _matrices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views [matrices, tokens, width] of heads-first tensors: all samples, or one at a time."""
    if tensors[0].shape[1] == 1:
        yield tuple(tensor.squeeze(1) for tensor in tensors)
    else:
        yield from zip(*(tensor.unbind(0) for tensor in tensors), strict=True)


def results(given: Arguments) -> torch.Tensor:
    return empty_result(given.q, given.v)


def run_products(given: Arguments) -> torch.Tensor:
    out = results(given)
    attend(given.q, given.k, given.v, given.scale, out)
    return out


def decline_products(given: Arguments) -> str | None:
    q, k, v = given.q, given.k, given.v
    if {q.dtype, k.dtype, v.dtype} not in [{dtype} for dtype in HALF]:
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if present(q.shape[3]) <= WIDEST_FLASH:
        return f"for heads of up to {WIDEST_FLASH} there are kernels that keep no scores"
    return decline_tensors(q, k, v)


SAME = "same"


def shape(given: Arguments) -> Shape:
    q, k = given.q, given.k
    keys = SAME if present(k.shape[2]) == present(q.shape[2]) else octave(k.shape[2])
    heads, width = octave(count(q.shape[:2])), present(q.shape[3])
    return {"tokens": octave(q.shape[2]), "keys": keys, "heads": heads, "width": width}


def _tokens(shape: Any) -> tuple[int, int]:
    return shape["tokens"], shape["tokens"] if shape["keys"] == SAME else int(shape["keys"])


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    return arguments(draw, *_tokens(shape), shape["width"], shape["heads"])


def block(shape: Any, draw: Draw) -> Block:
    """Return the attention in the middle of a VAE, with projections from and to a few channels."""
    heads, width = shape["heads"], shape["width"]
    x, context = (draw(1, tokens, NARROW) for tokens in _tokens(shape))
    inner = [draw(heads * width, NARROW) / NARROW**0.5 for _ in range(3)]
    outer = draw(NARROW, heads * width) / (heads * width) ** 0.5

    def middle(*inputs: torch.Tensor) -> torch.Tensor:
        x, context, to_q, to_k, to_v, outer = inputs
        query, key, value = (
            F.linear(side, weight).view(1, -1, heads, width).transpose(1, 2)
            for side, weight in ((x, to_q), (context, to_k), (context, to_v))
        )
        made = F.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False)
        return F.linear(made.transpose(1, 2).reshape(1, -1, heads * width), outer)

    return middle, (x, context, *inner, outer)


# AutoencoderKL's middle block at 512, 1024 and 2048 pixels.
STANDARD = [(tokens, SAME, 1, 512) for tokens in (4096, 16384, 65536)]
TRIAL = Trial.in_block(shape, alone, block, "tokens keys heads width", STANDARD)

PROVIDER = Provider("products", "wide_attention", run_products, decline_products)
OP = Op(
    "wide_attention",
    reference,
    draw_samples,
    (PROVIDER,),
    results=results,
    trial=TRIAL,
    keeps_strides=True,
    any_layout=True,
)
