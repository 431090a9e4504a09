"""The providers `int8` and `fp8` of `attention`: Triton kernels that multiply in 8 bits, as `rounded_attention` defines.

Three launches store q, k and v in 8 bits, and one computes. Values are stored transposed: tensor cores of Hopper read
float8 operands along the dim of the sum. All of it is part of the graph that is compiled. On a CPU `rounded_attention`
computes, which is slow: it shows on any machine what the rounding does to images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tritium import compat, device, envs
from tritium.ops.attention.reference import Sizes
from tritium.ops.attention.rounded import TILE, rounded_attention
from tritium.ops.op import Arguments
from tritium.ops.quantize_rows import FP8, LARGEST, ROTATIONS
from tritium.ops.triton_launch import decline_tensors, launch, with_dense_rows
from tritium.ops.wide_attention import empty_result

WIDTHS = (64, 128)
HALF = (torch.float16, torch.bfloat16)

# CUDA's limit for the second dim of a grid.
MOST_HEADS = 65_535

# The compute capability from which Triton multiplies float8.
HAS_FP8 = (8, 9)

TRITON_OPTIONS = ("num_warps", "num_stages")


def launch_options(width: int) -> dict[str, Any]:
    """Return the tiles of a program: BLOCK queries, and STEP keys at a time.

    TMA lets the hardware copy tiles of keys and values. VALUES8 multiplies weights and values in float8, otherwise in 16 bits.
    """
    del width
    cut = {"BLOCK": 128, "STEP": 128, "TMA": False, "VALUES8": True, "ROUNDED": True}
    return {**cut, "num_warps": 8, "num_stages": 2}


class Stored(NamedTuple):
    """Heads in 8 bits, padded to whole tiles, and their scales."""

    values: torch.Tensor
    scale: torch.Tensor
    tiles: int | torch.SymInt


def rotation_of(width: int) -> int:
    """Return the columns of heads of a width that are rotated together.

    >>> rotation_of(128), rotation_of(40), rotation_of(63)
    (64, 4, 0)
    """
    return next((group for group in reversed(ROTATIONS[:4]) if group and width % group == 0), 0)


def run(given: Arguments, dtype: torch.dtype) -> torch.Tensor:
    if not given.q.is_cuda and not envs.triton_interpreted():
        group = rotation_of(given.q.shape[3])
        return rounded_attention(given.q, given.k, given.v, given.scale, dtype, rotate=group)
    return run_triton(given, dtype)


def run_triton(given: Arguments, dtype: torch.dtype, chosen: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Launch the kernels with the options `chosen`, or with those of `launch_options` if it is None."""
    from tritium.ops.kernels.quantized_attention import quantized_attention_kernel

    q, k, v = map(with_dense_rows, (given.q, given.k, given.v))
    options = dict(launch_options(q.shape[3]) if chosen is None else chosen)
    out = empty_result(q, v)
    mean = k.mean(2, dtype=torch.float32)
    # GPUs compute exponentials in base 2.
    rows = stored(q, None, dtype, factor=float(given.scale) / math.log(2), per_row=True)
    keys = stored(k, mean, dtype)
    values = stored(v, None, FP8, rotates=False, transposed=True) if options.pop("VALUES8") else None
    block = options["BLOCK"]
    launch(
        quantized_attention_kernel,
        (-(-q.shape[2] // block), q.shape[0] * q.shape[1]),
        rows.values,
        rows.scale,
        keys.values,
        keys.scale,
        v if values is None else values.values,
        None if values is None else values.scale,
        out,
        q.shape[2],
        k.shape[2],
        q.shape[1],
        rows.tiles,
        keys.tiles,
        *((0, 0, 0) if values is not None else v.stride()[:3]),
        *out.stride()[:3],
        TILE=TILE,
        WIDTH=q.shape[3],
        WIDEN=is_interpreted(quantized_attention_kernel),
        options={name: options.pop(name) for name in TRITON_OPTIONS},
        **options,
    )
    return out


def is_interpreted(kernel: Any) -> bool:
    import triton

    return not isinstance(kernel, triton.JITFunction)


def stored(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    static: torch.Tensor | None = None,
    factor: float = 1.0,
    per_row: bool = False,
    rotates: bool = True,
    transposed: bool = False,
) -> Stored:
    """Store [B, N, S, D] minus a mean in 8 bits, with a scale times `factor` per row, or per tile of tokens.

    With a `static` scale, one number, no scales are stored.
    """
    from tritium.ops.kernels.quantized_attention import quantize_heads_kernel

    batch, heads, tokens, width = x.shape
    tiles = -(-tokens // TILE)
    sizes = (width, tiles * TILE) if transposed else (tiles * TILE, width)
    values = x.new_empty((batch * heads, *sizes), dtype=dtype)
    scale = x.new_empty((batch * heads, tiles * TILE if per_row else tiles), dtype=torch.float32)
    launch(
        quantize_heads_kernel,
        (tiles, batch * heads),
        x,
        mean,
        static,
        values,
        scale,
        tokens,
        heads,
        *x.stride()[:3],
        tiles,
        FACTOR=factor,
        PER_ROW=per_row,
        ROTATED=rotates,
        TRANSPOSED=transposed,
        FLOAT=dtype == FP8,
        LARGEST=LARGEST[dtype],
        WIDTH=width,
        TILE=TILE,
        WIDEN=is_interpreted(quantize_heads_kernel),
        options={"num_warps": 8},
    )
    return Stored(values, scale, tiles)


def decline_form(given: Arguments) -> str | None:
    """Return why attention in 8 bits cannot take a call on any device, or None."""
    sizes = Sizes.of(given)
    if given.mask is not None or given.causal:
        return "it takes no mask, and no causality"
    if sizes.heads != sizes.kv_heads:
        return "it takes as many heads of keys as of queries"
    if 0 in sizes:
        return "there is nothing to compute"
    if not given.scale > 0:
        return f"it takes a scale above 0, got {given.scale}"
    if compat.dynamo.needs_gradients(given.q, given.k, given.v):
        return "it computes no gradients here"
    return None


def decline_on_a_gpu(given: Arguments) -> str | None:
    """Return why kernels in 8 bits cannot take a call, or None."""
    sizes = Sizes.of(given)
    if given.q.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {given.q.dtype}"
    if sizes.width not in WIDTHS or sizes.value_width != sizes.width:
        return f"it takes heads {' or '.join(map(str, WIDTHS))} wide, got {sizes.width} and {sizes.value_width}"
    if sizes.batch * sizes.heads > MOST_HEADS:
        return f"it takes up to {MOST_HEADS:,} heads of all samples, got {sizes.batch * sizes.heads:,}"
    capability = device.capability(given.q.device)
    if capability is not None and capability < HAS_FP8:
        return f"float8 products need compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    return None


def decline(given: Arguments) -> str | None:
    if reason := decline_form(given):
        return reason
    if given.q.is_cuda or envs.triton_interpreted():
        return decline_on_a_gpu(given) or decline_tensors(given.q, given.k, given.v)
    if any(not isinstance(size, int) for tensor in (given.q, given.k) for size in tensor.shape):
        return "on a CPU it loops over keys, whose number is symbolic in this graph"
    return None if given.q.dtype in (*HALF, torch.float32) else f"it does not take {given.q.dtype}"
