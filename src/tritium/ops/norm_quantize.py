"""Quantize the rows of a modulated norm, of x or of a gated residual: `residual_norm_modulate` in 8 bits.

    r = x + gate * y, or x where y is None
    m = norm(r) * (1 + scale) + shift
    q, rows = quantize_rows(m, dtype, rotate, static, step)

Results are r, m, q and rows. r is empty without y, and m is empty unless `keep` is set: nothing but the quantization reads
it. m is quantized as computed, in float32 (float64 for float64); the m that is kept is rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from tritium import compat
from tritium.ops import quantize_rows, residual_norm_modulate
from tritium.ops.ada_norm import normed_and_modulated
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples
from tritium.ops.quantize_rows import FP8, INT8, LARGEST, ROTATIONS
from tritium.ops.residual_norm_modulate import NORMS, WHOLE_ROW, as_rows, launch_options, with_row_strides
from tritium.ops.triton_launch import contiguous, launch, with_dense_rows

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    dtype: torch.dtype,
    rotate: int = 0,
    static: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    keep: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Results:
    if norm not in NORMS:
        raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}")
    wide = torch.promote_types(x.dtype if y is None else torch.promote_types(x.dtype, y.dtype), torch.float32)
    residual = x
    if y is not None:
        added = y.to(wide) if gate is None else gate.to(wide) * y.to(wide)
        residual = (x.to(wide) + added).to(residual_dtype or torch.promote_types(x.dtype, y.dtype))
    value = normed_and_modulated(residual.to(wide), weight, bias, scale, shift, eps, norm)
    q, rows = quantize_rows.reference(value, dtype, rotate, static, step)
    out = value.to(out_dtype or residual.dtype) if keep else x.new_empty(0, dtype=out_dtype or residual.dtype)
    return residual if y is not None else x.new_empty(0), out, q, rows


def draw_samples(draw: Draw) -> Samples:
    order = ("x", "y", "gate", "weight", "bias", "scale", "shift", "eps", "norm", "dtype")
    given = [*residual_norm_modulate.draw_samples(draw)]
    for label, arguments in given:
        wide = arguments["x"].shape[-1] > WHOLE_ROW
        if wide or arguments.keys() & {"residual_dtype", "out_dtype"}:
            continue
        dtype = INT8 if "rms" in label else FP8
        yield label, {**{name: {**arguments, "dtype": dtype}[name] for name in order}}
    plain: dict[str, Any] = dict.fromkeys(order)
    for norm, dtype in (("layer", FP8), ("rms", INT8)):
        none = {**plain, "x": draw(2, 7, 100), "eps": 1e-6, "norm": norm, "dtype": dtype}
        yield f"{norm}, no residual", none
        modulation = {"y": draw(2, 7, 100), "scale": draw(2, 1, 100), "shift": draw(2, 1, 100)}
        row: dict[str, Any] = {"rotate": 0, "static": None, "step": None}
        yield f"{norm}, kept as well", {**none, **modulation, **row, "keep": True}
        step = draw(1).fill_(1).long().reshape(())
        static = draw(2, dtype=torch.float32).fill_(2**-4)
        yield f"{norm}, by step", {**none, **row, "static": static, "step": step}
    rows = {**plain, "x": draw(2, 7, 256), "y": draw(2, 7, 256), "eps": 1e-6, "norm": "layer", "dtype": INT8}
    for group in ROTATIONS[1:]:
        yield f"layer, rotated by {group}", {**rows, "rotate": group}


def results(given: Arguments) -> Results:
    x, y = given.x, given.y
    narrow = x.dtype if y is None else given.residual_dtype or torch.promote_types(x.dtype, y.dtype)
    empty = torch.Size((0,))
    residual = torch.empty(empty if y is None else x.shape, dtype=x.dtype if y is None else narrow, device=x.device)
    out = torch.empty(x.shape if given.keep else empty, dtype=given.out_dtype or narrow, device=x.device)
    return residual, out, *quantize_rows.results_like(x.shape, given.dtype, x.device)


def run_triton(given: Arguments) -> Results:
    from tritium.ops.kernels.norm_quantize import norm_quantize_kernel

    residual, out, q, rows = results(given)
    shape = given.x.shape
    if compat.traced.statically_known(q.numel() == 0):
        return residual, out, q, rows
    x, y = (None if part is None else with_dense_rows(as_rows(part, shape)) for part in (given.x, given.y))
    assert x is not None
    modulation = [with_row_strides(part, shape) for part in (given.gate, given.scale, given.shift)]
    gate, scale, shift = (part for part, _ in modulation)
    weight, bias = (contiguous(None if part is None else part.expand(shape[-1])) for part in (given.weight, given.bias))
    batches, tokens, width = x.shape
    cut, options = launch_options(width)
    launch(
        norm_quantize_kernel,
        (-(-batches * tokens // cut["ROWS"]),),
        x,
        y,
        gate,
        weight,
        bias,
        scale,
        shift,
        given.static,
        given.step,
        None if y is None else residual,
        out if given.keep else None,
        q,
        rows,
        batches * tokens,
        tokens,
        *x.stride()[:2],
        *((0, 0) if y is None else y.stride()[:2]),
        *(stride for _, strides in modulation for stride in strides),
        EPS=float(given.eps),
        LAYER=given.norm == "layer",
        LAST=0 if given.static is None else given.static.numel() - 1,
        STEPS=ROTATIONS.index(given.rotate),
        FLOAT=given.dtype == FP8,
        LARGEST=LARGEST[given.dtype],
        WIDTH=width,
        options=options,
        **cut,
    )
    return residual, out, q, rows


def decline_triton(given: Arguments) -> str | None:
    if given.dtype not in LARGEST or given.rotate not in ROTATIONS:
        return "the reference raises for these arguments"
    width = given.x.shape[-1] if given.x.dim() else 0
    if not isinstance(width, int):
        return "the kernel's rows have one width, this one is dynamic"
    if width > WHOLE_ROW or (given.rotate and width % given.rotate):
        return f"the kernel holds whole rows of up to {WHOLE_ROW} columns, in whole groups"
    if given.rotate > launch_options(int(width))[0]["TILE"]:
        return f"rows of {width} columns are narrower than a group of {given.rotate}"
    with_y = Arguments(**{**vars(given), "y": given.x if given.y is None else given.y})
    return residual_norm_modulate.decline_triton(with_y) or quantize_rows.decline_static(given.static, given.step)


# Inductor compiles the reference to one kernel that reads a row three times, from the cache.
PROVIDER = Provider("triton", "norm_quantize", run_triton, decline_triton, traced=True)
OP = Op("norm_quantize", reference, draw_samples, (PROVIDER,), results=results, default="triton")
