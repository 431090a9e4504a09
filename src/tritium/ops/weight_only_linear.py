"""`linear(x, dequantized weight, bias)`: a linear layer whose weight is stored in 8 or 4 bits.

int8: weight [N, K] int8 and scale [N, 1]. 4 bits: weight [N, K / 2] uint8, two signed values a byte with the even column in
the low half, and scale [N, K / group] for groups of 32, 64 or 128 columns. Scales are float32. The weight is rounded to x's
dtype before the product.

This saves memory, not time: products of many rows are bound by arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops import scaled_linear
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples
from tritium.ops.quantize_rows import FP8, INT8, TINY, powers_of_two, quantize_weight
from tritium.ops.quantize_rows import reference as quantize

# The columns of a 4-bit weight that share a scale.
GROUPS = (32, 64, 128)

# Values of 4 bits are -8 to 7. With this divisor of the largest magnitude, clamping costs at most half a step too.
HALF_RANGE = 7.5


def pack_int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [N, K] as uint8 [N, K / 2] with two values a byte, and its scales [N, K / group]."""
    if weight.dim() != 2 or group not in GROUPS or weight.shape[1] % group:
        listed = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"4 bits need a weight [N, K] and groups of {listed} columns that divide K; got shape "
            f"{tuple(weight.shape)} and group {group}"
        )
    groups = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True).to(torch.float32) * (1 / HALF_RANGE)).clamp(min=TINY)
    values = (groups * scale.reciprocal()).round().clamp(-8, 7).to(torch.int8).flatten(1)
    halves = values.view(torch.uint8) & 15
    packed: torch.Tensor = halves[:, ::2] | halves[:, 1::2] << 4
    return packed, scale.squeeze(-1)


def unpack_int4(weight: torch.Tensor) -> torch.Tensor:
    """Return the int8 values [N, K] of a packed weight [N, K / 2]."""
    halves = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(1)
    # Extend the sign of 4 bits.
    return (halves ^ 8).to(torch.int8).sub(8)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored weight as [N, K] in a dtype, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    if weight.dtype == torch.int8:
        return (weight.to(wide) * scale).to(dtype)
    groups = unpack_int4(weight).unflatten(1, (scale.shape[1], -1))
    weights: torch.Tensor = (groups.to(wide) * scale[..., None]).flatten(1).to(dtype)
    return weights


def int4_as_fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a packed weight as float8 [N, K] and row scales [N, 1]; rounding to 3 mantissa bits costs accuracy."""
    # The bound on a row's magnitude needs no pass over the weight.
    row, inverse = powers_of_two(8 * scale.to(torch.float32).amax(1, keepdim=True))
    groups = unpack_int4(weight).unflatten(1, (scale.shape[1], -1))
    return (groups.to(torch.float32) * (scale * inverse)[..., None]).flatten(1).to(FP8), row


def check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise a `ValueError` unless weight and scale are a stored weight for x."""
    given = f"x {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)} and scale {tuple(scale.shape)}"
    if weight.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"a stored weight is int8 [N, K], or uint8 [N, K / 2] with 4-bit values; got {given}")
    if weight.dim() != 2 or scale.dim() != 2 or scale.shape[0] != weight.shape[0]:
        raise ValueError(f"the weight is [N, K] with a row of scales for each of its N rows; got {given}")
    columns = weight.shape[1] * (1 if weight.dtype == torch.int8 else 2)
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(f"the weight has {columns} columns, x must have as many; got {given}")
    if weight.dtype == torch.int8 and scale.shape[1] != 1:
        raise ValueError(f"an int8 weight has one scale per row, [N, 1]; got {given}")
    if weight.dtype == torch.uint8 and columns not in [scale.shape[1] * group for group in GROUPS]:
        raise ValueError(f"a 4-bit weight has a scale per {', '.join(map(str, GROUPS))} columns; got {given}")


def reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    check(x, weight, scale)
    return F.linear(x, dequantize(weight, scale, x.dtype), None if bias is None else bias.to(x.dtype))


def draw_samples(draw: Draw) -> Samples:
    def int8(x: torch.Tensor, n: int, *, bias: bool = True) -> dict[str, Any]:
        weight, scale = quantize_weight(draw(n, x.shape[-1]) / max(1, x.shape[-1]) ** 0.5, INT8)
        return {"x": x, "weight": weight, "scale": scale, "bias": draw(n) if bias else None}

    def int4(x: torch.Tensor, n: int, group: int) -> dict[str, Any]:
        weight, scale = pack_int4(draw(n, x.shape[-1]) / x.shape[-1] ** 0.5, group)
        return {"x": x, "weight": weight, "scale": scale, "bias": draw(n)}

    yield "int8, awkward", int8(draw(2, 7, 63), 100)
    # Wide in the output: the op does not define how a GEMM rounds long sums.
    yield "int8, wide", int8(draw(1, 7), 3072, bias=False)
    yield "int8, wider", int8(draw(1, 60), 5120)
    yield "int8, transposed", int8(draw(2, 60, 7).transpose(1, 2), 1)
    yield "int8, no rows", int8(draw(0, 60), 7)
    for group in GROUPS:
        yield f"int4, groups of {group}", int4(draw(2, 7, 2 * group), 64, group)
    yield "int4, odd sizes", int4(draw(63, 96), 7, 32)
    yield "int4, one row", int4(draw(64), 1, 64)
    yield "int4, transposed", int4(draw(2, 128, 7).transpose(1, 2), 16, 64)


def run_inlined(given: Arguments) -> torch.Tensor:
    return reference(**vars(given)).contiguous()


def decline_inlined(given: Arguments) -> str | None:
    del given
    return None


def run_fp8(given: Arguments) -> torch.Tensor:
    """Multiply in float8, the rows of x quantized as well; the weight passes through memory once, in float8."""
    q, scale = quantize(given.x, FP8)
    return scaled_linear.run_scaled_mm(_in_fp8(given, q, scale, *int4_as_fp8(given.weight, given.scale)))


def decline_fp8(given: Arguments) -> str | None:
    x, weight = given.x, given.weight
    if weight.dtype != torch.uint8:
        return "it multiplies 4-bit weights"
    # Their shapes and dtypes decide, not their values.
    q, scale = x.to(torch.int8).view(FP8), x[..., :1]
    return scaled_linear.decline_scaled_mm(_in_fp8(given, q, scale, unpack_int4(weight), given.scale))


def _in_fp8(given: Arguments, *quantized: torch.Tensor) -> Arguments:
    names = ("q", "scale", "weight", "weight_scale")
    sides = dict(zip(names, quantized, strict=True))
    return Arguments(**sides, bias=given.bias, out_dtype=given.x.dtype, activation="none")


PROVIDER = Provider("inlined", "weight_only_linear", run_inlined, decline_inlined, inlined=True)
# Its error is that of float8 activations: it runs only if it is pinned.
IN_FP8 = Provider("fp8", "weight_only_linear", run_fp8, decline_fp8, traced=True, lossy=True)
OP = Op("weight_only_linear", reference, draw_samples, (PROVIDER, IN_FP8))
