"""`x / sqrt(mean(x^2) + eps) * weight` over the last dim, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from tritium.ops.launch import cannot_launch, remembered, start
from tritium.ops.op import Op, Provider, Sample

# A row this wide still fits the registers of one program of 16 warps; wider rows take a second pass over memory.
WHOLE_ROW = 16_384

# Numbers of narrow rows that one program takes together, 16 for each thread of 4 warps: with a program for each head of 128
# an H200 took 70 us for 28 MB.
TOGETHER = 2_048


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(out_dtype or x.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None) -> torch.Tensor:
    del weight, eps
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    for width in (1, 7, 60, 63, 100, 128, 3072, 5120):
        yield Sample(f"rows of {width}", _arguments(random(3, width), random(width)))
    yield Sample("no weight", _arguments(random(2, 7, 128), None))
    yield Sample("FLUX q: heads after sequence", _arguments(random(1, 63, 24, 128), random(128)))
    yield Sample("transposed", _arguments(random(2, 100, 24).transpose(1, 2), random(100)))
    yield Sample("every second row", _arguments(random(14, 60)[::2], random(60)))
    yield Sample("one row", _arguments(random(128), random(128)))
    yield Sample("no rows", _arguments(random(0, 128), random(128)))
    yield Sample("wider than one program", _arguments(random(2, WHOLE_ROW + 7), random(WHOLE_ROW + 7)))


def _arguments(x: torch.Tensor, weight: torch.Tensor | None) -> dict[str, Any]:
    return {"x": x, "weight": weight, "eps": 1e-6, "out_dtype": None}


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    # Triton takes annotations for types of its own: only compile-time constants may have one.
    @triton.jit  # type: ignore[untyped-decorator]
    def rms_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        out_ptr,
        eps,
        rows,
        width,
        row_stride,
        HAS_WEIGHT: tl.constexpr,
        WHOLE: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        # 64 bits: rows times width passes 2^31 for video.
        first = tl.program_id(0).to(tl.int64) * ROWS
        columns = tl.arange(0, BLOCK)
        if WHOLE:
            row = first + tl.arange(0, ROWS)[:, None]
            inside = (row < rows) & (columns < width)[None, :]
            x = tl.load(x_ptr + row * row_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
            if HAS_WEIGHT:
                weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
                y = y * weight.to(tl.float32)[None, :]
            tl.store(out_ptr + row * width + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            x_row = x_ptr + first * row_stride
            out_row = out_ptr + first * width
            squares = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, width, BLOCK):
                x = tl.load(x_row + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
                squares += x * x
            scale = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
            for start in range(0, width, BLOCK):
                inside = start + columns < width
                y = tl.load(x_row + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
                if HAS_WEIGHT:
                    y = y * tl.load(weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
                tl.store(out_row + start + columns, y.to(out_ptr.dtype.element_ty), mask=inside)

    return rms_norm_kernel


def launch_options(width: int) -> dict[str, int | bool]:
    """How rows of a width are cut.

    >>> launch_options(128)
    {'WHOLE': True, 'ROWS': 16, 'BLOCK': 128, 'num_warps': 4}
    """
    if width > WHOLE_ROW:
        return {"WHOLE": False, "ROWS": 1, "BLOCK": 4096, "num_warps": 8}
    block = 1 << (width - 1).bit_length()
    return {
        "WHOLE": True,
        "ROWS": max(1, TOGETHER // block),
        "BLOCK": block,
        "num_warps": min(16, max(4, block // 512)),
    }


def run_triton(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None) -> torch.Tensor:
    width = x.shape[-1]
    out = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    options = launch_options(width)
    start(
        _kernel(),
        (-(-rows.shape[0] // options["ROWS"]),),
        rows,
        rows if weight is None else weight.contiguous(),
        out,
        float(eps),
        rows.shape[0],
        width,
        rows.stride(0),
        HAS_WEIGHT=weight is not None,
        **options,
    )
    return out


def decline_triton(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> str | None:
    del eps, out_dtype
    return cannot_launch(x, weight)


OP = Op(
    name="rms_norm",
    schema="(Tensor x, Tensor? weight, float eps, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(Provider("triton", "rms_norm", remembered(run_triton), decline_triton),),
)
