"""Quantize rows, blocks and weights, and multiply what is quantized.

Values and scales are plain tensors: `x` is close to `q * scale`. Formats: `fp8` is float8_e4m3fn with scales that are powers
of two, `int8` is symmetric.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import check_rank, check_shape, checked, checked_with_stored
from tritium.layers.eager import compute
from tritium.ops import quantize_rows as rows
from tritium.ops import scaled_linear as product
from tritium.ops import weight_only_linear as stored

_DTYPES = {"fp8": rows.FP8, "int8": rows.INT8}

# The columns of a block's scale: heads are at most as wide, so that a head has one.
_BLOCK_COLUMNS = 128


@checked
def quantize_rows(
    x: torch.Tensor,
    format: Literal["fp8", "int8"] = "fp8",  # noqa: A002 - the name in Quantize
    *,
    rotate: int = 0,
    scale: torch.Tensor | None = None,
    fused: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x in 8 bits, and a float32 scale for each row, [..., 1].

    Args:
        x: [..., K].
        format: `fp8` or `int8`.
        rotate: Multiply groups of 4, 16, 64 or 256 columns by a regular Hadamard matrix before rounding; 0 for none. The
            weight of the product must be rotated alike.
        scale: One float32 number for all rows, measured before; None computes the scale of each row.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    check_rotation(x, rotate)
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ArgumentError(f"scale must be one float32 number, got {scale.dtype} of shape {tuple(scale.shape)}")
    return compute(rows.OP, fused, x, _DTYPES[format], rotate, scale)  # type: ignore[no-any-return]


@checked
def quantize_weight(
    weight: torch.Tensor,
    format: Literal["fp8", "int8", "int8-weights", "int4-weights"] = "fp8",  # noqa: A002
    *,
    rotate: int = 0,
    group: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight [N, K] of a linear layer in 8 or 4 bits, and its float32 scales.

    Args:
        weight: [N, K].
        format: `fp8` and `int8` are for `scaled_linear`, `int8-weights` and `int4-weights` for `weight_only_linear`.
        rotate: The groups of columns that are rotated, as in `quantize_rows`.
        group: The number of columns that share a scale in `int4-weights`: 32, 64 or 128.
    """
    check_rank("weight", weight, 2)
    if format in _DTYPES:
        check_rotation(weight, rotate)
        return rows.quantize_weight(weight, _DTYPES[format], rotate)
    if rotate:
        raise ArgumentError(f"rotate={rotate} is for products in 8 bits, and {format} stores weights; leave it out")
    if format == "int8-weights":
        return rows.quantize_weight(weight, rows.INT8)
    if group not in stored.GROUPS or weight.shape[1] % group:
        groups = ", ".join(map(str, stored.GROUPS))
        raise ArgumentError(f"group must be one of {groups} and divide {weight.shape[1]} columns, got {group}")
    return stored.pack_int4(weight, group)


@checked_with_stored("q", "weight")
def scaled_linear(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    activation: Literal["none", "gelu_tanh"] = "none",
    fused: bool = True,
) -> torch.Tensor:
    """Return `activation((q * scale) @ (weight * weight_scale).T + bias)`, rounded once.

    Args:
        q: [..., K] in int8 or float8_e4m3fn, as `quantize_rows` returns it.
        scale: [..., 1] in float32.
        weight: [N, K] in the dtype of q.
        weight_scale: [N, 1] in float32.
        bias: [N] or None.
        out_dtype: The dtype of the result.
        activation: `gelu_tanh` or none.
        fused: Whether a library's product or a fused kernel may compute it; False multiplies dequantized values.
    """
    for name, value in (("q", q), ("weight", weight)):
        if value.dtype not in rows.LARGEST:
            raise ArgumentTypeError(f"{name} must be int8 or float8_e4m3fn, got {value.dtype}")
    if q.dtype != weight.dtype:
        raise ArgumentError(f"q and weight must have one dtype, got {q.dtype} and {weight.dtype}")
    check_rank("weight", weight, 2)
    if q.dim() == 0 or q.shape[-1] != weight.shape[1]:
        raise ArgumentError(f"q must be [..., {weight.shape[1]}] as weight is, got shape {tuple(q.shape)}")
    check_shape("scale", scale, (*q.shape[:-1], 1))
    check_shape("weight_scale", weight_scale, (weight.shape[0], 1))
    check_shape("bias", bias, (weight.shape[0],))
    for name, value in (("scale", scale), ("weight_scale", weight_scale)):
        if value.dtype != torch.float32:
            raise ArgumentTypeError(f"{name} must be float32, got {value.dtype}")
    if not out_dtype.is_floating_point or out_dtype.itemsize == 1:
        raise ArgumentError(f"out_dtype must be float16, bfloat16, float32 or float64, got {out_dtype}")
    arguments = q, scale, weight, weight_scale, bias, out_dtype, activation
    return compute(product.OP, fused, *arguments)  # type: ignore[no-any-return]


@checked_with_stored("weight")
def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fused: bool = True,
) -> torch.Tensor:
    """Return `linear(x, dequantized weight, bias)` of a weight that is stored in 8 or 4 bits, in the dtype of x.

    Args:
        x: [..., K].
        weight: int8 [N, K], or uint8 [N, K / 2] with two values a byte.
        scale: float32, [N, 1] for int8, and a column per group for 4 bits.
        bias: [N] or None.
        fused: Whether an owned kernel may compute it; False runs PyTorch operators.
    """
    try:
        stored.check(x, weight, scale)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    check_shape("bias", bias, (weight.shape[0],))
    return compute(stored.OP, fused, x, weight, scale, bias)  # type: ignore[no-any-return]


@checked
def quantize_blocks(
    x: torch.Tensor, block_size: int = 128, *, layout: Literal["BNSD", "BSND"] = "BNSD"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query, key or value as float8_e4m3fn [B, N, S, D], and a scale for each block of tokens.

    Args:
        x: [B, N, S, D], or [B, S, N, D] with the layout `BSND`.
        block_size: The number of tokens that share a scale; the last block may be shorter.
        layout: The layout of x.

    The scales are [B, N, blocks, D / 128], rounded up: heads of up to 128 have one scale a block.
    """
    check_rank("x", x, 4)
    if block_size < 1:
        raise ArgumentError(f"block_size must be 1 or more, got {block_size}")
    x = x.transpose(1, 2) if layout == "BSND" else x
    tokens, columns = x.shape[2:]
    blocks = -(-tokens // block_size), -(-columns // _BLOCK_COLUMNS)
    padded = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), _padding(x, blocks, block_size))
    tiles = padded.unflatten(3, (blocks[1], -1)).unflatten(2, (blocks[0], -1))
    scale, inverse = rows.powers_of_two(tiles.abs().amax((3, 5)).to(torch.float32))
    largest = rows.LARGEST[rows.FP8]
    q = (tiles * inverse[:, :, :, None, :, None]).clamp(-largest, largest).to(rows.FP8)
    return q.flatten(4, 5).flatten(2, 3)[:, :, :tokens, :columns].contiguous(), scale


def _padding(x: torch.Tensor, blocks: tuple[int, int], block_size: int) -> tuple[int, int, int, int]:
    """Return the padding at the end of both dims to whole blocks; heads narrower than a block are not padded."""
    width = min(_BLOCK_COLUMNS, x.shape[3])
    return 0, blocks[1] * width - x.shape[3], 0, blocks[0] * block_size - x.shape[2]


def check_rotation(x: torch.Tensor, group: int) -> None:
    try:
        rows.check_rotation(x, group)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
