"""`residual_norm_modulate` on a GPU."""

from __future__ import annotations

import torch

from tritium import compat
from tritium.ops import rows
from tritium.ops.op import Arguments
from tritium.ops.residual_norm_modulate.reference import NORMS
from tritium.ops.triton_launch import NARROW, dynamic_width, launch, obstacle


def results(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x, narrow = given.x, given.residual_dtype or torch.promote_types(given.x.dtype, given.y.dtype)
    residual, out = (
        torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (narrow, given.out_dtype or narrow)
    )
    return residual, out


def run_triton(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from tritium.ops.kernels.residual_norm_modulate import residual_norm_modulate_kernel

    residual, out = results(given)
    shape = given.x.shape
    if compat.traced.statically_known(out.numel() == 0):
        return residual, out
    x, y = rows.as_dense_rows(given.x, shape), rows.as_dense_rows(given.y, shape)
    gate, scale, shift = (
        None if part is None else rows.as_rows(part, shape) for part in (given.gate, given.scale, given.shift)
    )
    weight, bias = (
        None if part is None else part.expand(shape[-1]).contiguous() for part in (given.weight, given.bias)
    )
    batches, tokens, width = x.shape
    cut, options = rows.launch_options(width)
    launch(
        residual_norm_modulate_kernel,
        (-(-batches * tokens // cut["ROWS"]),),
        x,
        y,
        gate,
        weight,
        bias,
        scale,
        shift,
        residual,
        out,
        batches * tokens,
        tokens,
        *x.stride()[:2],
        *y.stride()[:2],
        *_strides(gate),
        *_strides(scale),
        *_strides(shift),
        EPS=float(given.eps),
        LAYER=given.norm == "layer",
        WIDTH=width,
        options=options,
        **cut,
    )
    return residual, out


def _strides(rows_of: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if rows_of is None else rows_of.stride()


def decline_triton(given: Arguments) -> str | None:
    x, y, modulation = given.x, given.y, (given.gate, given.scale, given.shift)
    if given.norm not in NORMS:
        return f"the kernel knows the norms {', '.join(NORMS)}, not {given.norm!r}"
    if x.dim() == 0 or x.dim() != y.dim():
        return f"the kernel takes x and y of one shape [..., H], got ranks {x.dim()} and {y.dim()}"
    if any(part.dim() > x.dim() for part in modulation if part is not None):
        return f"the kernel broadcasts gate, scale and shift against x, which has rank {x.dim()} only"
    results = (given.residual_dtype, given.out_dtype)
    wide = [str(dtype) for dtype in results if dtype is not None and dtype not in NARROW]
    if wide:
        return f"the kernel computes in float32 and cannot write {', '.join(wide)}"
    return dynamic_width(x.shape[-1]) or obstacle(x, y, given.weight, given.bias, *modulation)
