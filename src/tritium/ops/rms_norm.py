"""`x / sqrt(mean(x^2) + eps) * weight` over the last dim, in float32 (float64 for float64), rounded once."""

from __future__ import annotations

from typing import Any

import torch

from tritium import compat
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples
from tritium.ops.triton_launch import contiguous, decline_tensors, launch, with_dense_rows

# The widest row that fits in the registers of one program of 16 warps; wider rows take a second pass over memory.
WHOLE_ROW = 16_384

# Elements of narrow rows per program, 16 for each thread of 4 warps. With one program per head of 128 an H200 took 70 us
# for 28 MB.
TOGETHER = 2_048


def reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(out_dtype or x.dtype)


def draw_samples(draw: Draw) -> Samples:
    for label, x, weight in (
        *((f"rows of {width}", draw(3, width), draw(width)) for width in (1, 7, 60, 63, 100, 128, 3072, 5120)),
        ("no weight", draw(2, 7, 128), None),
        ("FLUX q: heads after sequence", draw(1, 63, 24, 128), draw(128)),
        ("transposed", draw(2, 100, 24).transpose(1, 2), draw(100)),
        ("every second row", draw(14, 60)[::2], draw(60)),
        ("one row", draw(128), draw(128)),
        ("no rows", draw(0, 128), draw(128)),
        ("wider than one program", draw(2, WHOLE_ROW + 7), draw(WHOLE_ROW + 7)),
    ):
        yield label, {"x": x, "weight": weight, "eps": 1e-6}


def launch_options(width: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the tiling of rows of a width, and Triton's options.

    >>> launch_options(128)
    ({'WHOLE': True, 'ROWS': 16, 'BLOCK': 128}, {'num_warps': 4})
    """
    if width > WHOLE_ROW:
        return {"WHOLE": False, "ROWS": 1, "BLOCK": 4096}, {"num_warps": 8}
    block = 1 << (width - 1).bit_length()
    cut = {"WHOLE": True, "ROWS": max(1, TOGETHER // block), "BLOCK": block}
    return cut, {"num_warps": min(16, max(4, block // 512))}


def results(given: Arguments) -> torch.Tensor:
    return torch.empty(given.x.shape, dtype=given.out_dtype or given.x.dtype, device=given.x.device)


def run_triton(given: Arguments) -> torch.Tensor:
    from tritium.ops.kernels.rms_norm import rms_norm_kernel

    x, weight, width = given.x, given.weight, given.x.shape[-1]
    out = results(given)
    if compat.traced.statically_known(out.numel() == 0):
        return out
    rows = with_dense_rows(x.reshape(-1, width))
    cut, options = launch_options(width)
    launch(
        rms_norm_kernel,
        (-(-rows.shape[0] // cut["ROWS"]),),
        rows,
        contiguous(weight),
        out,
        rows.shape[0],
        width,
        rows.stride(0),
        EPS=float(given.eps),
        HAS_WEIGHT=weight is not None,
        options=options,
        **cut,
    )
    return out


def decline_triton(given: Arguments) -> str | None:
    return decline_tensors(given.x, given.weight)


PROVIDER = Provider("triton", "rms_norm", run_triton, decline_triton, traced=True)
OP = Op("rms_norm", reference, draw_samples, (PROVIDER,), results=results)
