"""A gated residual with norm and modulation: `r = x + gate * y` and `norm(r) * (1 + scale) + shift`.

Computed in float32 (float64 for float64), each result rounded once; the norm reads the rounded residual, as the next
layer will. `norm` is "layer" or "rms", with weight and bias. x and y have one shape [..., H]; gate, scale and shift are
broadcast against it and do not affect the results' dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.ops.ada_norm import normed_and_modulated
from tritium.ops.op import NARROW, Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave, present
from tritium.ops.triton_launch import DTYPES, decline_tensors, dynamic_width, launch, with_dense_rows

NORMS = ("layer", "rms")

# The widest row that fits in the registers of one program of 8 warps; wider rows are read in a loop.
WHOLE_ROW = 16_384

# Elements that one warp loads with one 16-byte access per thread, in bfloat16.
WARP_TILE = 32 * 8


def reference(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm not in NORMS:
        raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}")
    narrow = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    added = y.to(wide) if gate is None else gate.to(wide) * y.to(wide)
    residual = (x.to(wide) + added).to(residual_dtype or narrow)
    value = normed_and_modulated(residual.to(wide), weight, bias, scale, shift, eps, norm)
    return residual, value.to(out_dtype or residual.dtype)


def arguments(x: torch.Tensor, y: torch.Tensor, norm: str, **others: Any) -> dict[str, Any]:
    """Return arguments without gate, weight, bias and modulation, unless `others` contains them."""
    optional: dict[str, Any] = dict.fromkeys(("gate", "weight", "bias", "scale", "shift"))
    return {"x": x, "y": y, **optional, "eps": 1e-6, "norm": norm, **others}


def draw_samples(draw: Draw) -> Samples:
    def sample(x: torch.Tensor, modulation: tuple[int, ...], norm: str, **others: Any) -> dict[str, Any]:
        y, gate, scale, shift = draw(*x.shape), draw(*modulation), draw(*modulation), draw(*modulation)
        return {**arguments(x, y, norm, gate=gate, scale=scale, shift=shift), **others}

    for norm, batch, tokens, width in (
        ("layer", 2, 1, 1),
        ("rms", 2, 7, 7),
        ("layer", 1, 63, 100),
        ("rms", 1, 100, 63),
        ("layer", 2, 2, 3072),
        ("rms", 1, 3, 3072),
        ("layer", 1, 2, 5120),
        ("rms", 1, 1, 5120),
    ):
        yield f"{norm}, {tokens} tokens of {width}", sample(draw(batch, tokens, width), (batch, 1, width), norm)
    affine = {"weight": draw(100), "bias": draw(100)}
    yield "a plain residual and norm", arguments(draw(2, 7, 100), draw(2, 7, 100), "layer", **affine)
    yield "everything", sample(draw(2, 7, 100), (2, 1, 100), "layer", **affine)
    yield "one gate for all, no shift", sample(draw(2, 7, 60), (1, 1, 60), "rms", shift=None)
    yield "modulation of rank 1, no scale", sample(draw(2, 7, 60), (60,), "layer", scale=None)
    yield "modulation a token", sample(draw(2, 7, 60), (2, 7, 60), "rms", weight=draw(60))
    yield "one value a token", sample(draw(2, 7, 60), (2, 7, 1), "layer")
    yield "two batches in one program", sample(draw(5, 3, 60), (5, 1, 60), "layer")
    floats = {name: draw(2, 1, 1536, dtype=torch.float32) for name in ("gate", "scale", "shift")}
    yield "Wan: modulation in float32", sample(draw(2, 3, 1536), (1536,), "layer", **floats)
    chunks = draw(2, 6 * 128)[:, None].chunk(6, -1)
    parts = {"shift": chunks[0], "scale": chunks[1], "gate": chunks[2]}
    yield "chunks of one modulation", sample(draw(2, 7, 128), (128,), "layer", **parts)
    sliced = draw(2, 12, 64)[:, 5:]
    yield "tokens of a longer sequence", sample(draw(2, 7, 128)[..., 64:], (2, 1, 64), "rms", y=sliced)
    heads = draw(2, 3, 7, 64).transpose(1, 2)
    yield "heads", sample(draw(2, 7, 3, 64), (2, 7, 1, 64), "layer", y=heads)
    gate = draw(60, 2, 1).permute(1, 2, 0)
    yield "transposed", sample(draw(2, 60, 7).transpose(1, 2), (2, 1, 60), "layer", gate=gate)
    yield "one row", sample(draw(128), (128,), "rms")
    yield "residual in float32", sample(draw(3, 60), (60,), "rms", residual_dtype=torch.float32)
    yield "out in bfloat16", sample(draw(3, 60), (3, 60), "layer", residual_dtype=None, out_dtype=torch.bfloat16)
    yield "no tokens", sample(draw(2, 0, 128), (2, 1, 128), "layer")
    for norm in NORMS:
        yield f"{norm}, wider than one program", sample(draw(2, WHOLE_ROW + 7), (WHOLE_ROW + 7,), norm)


def launch_options(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiling of rows of a width, and Triton's options. PIECES is 0 for rows that one program cannot hold.

    A program holds whole rows in registers as a tuple of tiles of one size. A tile is one 16-byte access per thread in
    bfloat16, and only the last tile has idle lanes. With a single tile of the next power of two, 25 % of the lanes would
    be idle for a width of 3072, and 37 % for 5120.

    A row gets few warps with up to 5 tiles each. By the register count of sm_90 code, 4 to 9 programs then fit on a
    multiprocessor of an H200, with at least 80 KiB of loads in flight; about 25 KiB hide the memory latency. With few warps
    the barrier of a reduction is short.
    """
    if width > WHOLE_ROW:
        return {"ROWS": 1, "TILE": 16 * WARP_TILE, "PIECES": 0}, {"num_warps": 16}
    warps = next((warps for warps in (1, 2, 4) if width <= 5 * warps * WARP_TILE), 8)
    tile = warps * WARP_TILE
    while tile // 2 >= max(width, 16):
        tile //= 2
    # Narrow rows share a program, so that every program has work for at least 4 warps.
    cut = {"ROWS": max(1, 4 * WARP_TILE // tile), "TILE": tile, "PIECES": -(-width // tile)}
    return cut, {"num_warps": max(4, warps)}


def as_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `tensor`, broadcast to a non-empty shape of rank 1 or more, as [B, S, H]: a view if possible."""
    return tensor.expand(shape).reshape(shape[0] if len(shape) > 2 else 1, -1, shape[-1])


def with_row_strides(tensor: torch.Tensor | None, shape: torch.Size) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
    """Return a tensor with its strides as [B, S, H], broadcast to a non-empty shape of rank 1 or more.

    A view costs the host a microsecond in each call of the generated code, strides cost nothing.
    """
    if tensor is None:
        return None, (0, 0, 0)
    if len(shape) > 3:
        rows = as_rows(tensor, shape)
        return rows, rows.stride()
    missing = 3 - tensor.dim()
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor, (*[0] * missing, *strides)


def results(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x, narrow = given.x, given.residual_dtype or torch.promote_types(given.x.dtype, given.y.dtype)
    residual = torch.empty(x.shape, dtype=narrow, device=x.device)
    return residual, torch.empty(x.shape, dtype=given.out_dtype or narrow, device=x.device)


def run_triton(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from tritium.ops.kernels.residual_norm_modulate import residual_norm_modulate_kernel

    residual, out = results(given)
    shape = given.x.shape
    if compat.traced.statically_known(out.numel() == 0):
        return residual, out
    x, y = (with_dense_rows(as_rows(part, shape)) for part in (given.x, given.y))
    modulation = [with_row_strides(part, shape) for part in (given.gate, given.scale, given.shift)]
    gate, scale, shift = (part for part, _ in modulation)
    weight, bias = (
        None if part is None else part.expand(shape[-1]).contiguous() for part in (given.weight, given.bias)
    )
    batches, tokens, width = x.shape
    cut, options = launch_options(width)
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
        *(stride for _, strides in modulation for stride in strides),
        EPS=float(given.eps),
        LAYER=given.norm == "layer",
        WIDTH=width,
        options=options,
        **cut,
    )
    return residual, out


def decline_triton(given: Arguments) -> str | None:
    x, y, modulation = given.x, given.y, (given.gate, given.scale, given.shift)
    if given.norm not in NORMS:
        return f"the kernel knows the norms {', '.join(NORMS)}, not {given.norm!r}"
    if x.dim() == 0 or x.dim() != y.dim():
        return f"the kernel takes x and y of one shape [..., H], got ranks {x.dim()} and {y.dim()}"
    if any(part.dim() > x.dim() for part in modulation if part is not None):
        return f"the kernel broadcasts gate, scale and shift against x, which has rank {x.dim()} only"
    wide = [str(dtype) for dtype in (given.residual_dtype, given.out_dtype) if dtype not in (None, *DTYPES)]
    if wide:
        return f"the kernel computes in float32 and cannot write {', '.join(wide)}"
    return dynamic_width(x.shape[-1]) or decline_tensors(x, y, given.weight, given.bias, *modulation)


def shape(given: Arguments) -> Shape:
    x = given.x
    return {"tokens": octave(count(x.shape[:-1])), "width": present(x.shape[-1]), "norm": given.norm}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    x, y = (draw(1, shape["tokens"], shape["width"]) for _ in "xy")
    gate, scale, shift = draw(1, 1, 3 * shape["width"]).chunk(3, -1)
    return arguments(x, y, shape["norm"], gate=gate, scale=scale, shift=shift)


def block(shape: Any, draw: Draw) -> Block:
    """Return the op between two projections of a transformer block, which are narrow here."""
    given = alone(shape, draw)
    width = shape["width"]
    inner, outer = draw(width, NARROW) / NARROW**0.5, draw(NARROW, width) / width**0.5
    inputs = (given["x"], draw(1, shape["tokens"], NARROW), inner, outer)

    def between(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, inner, outer, gate, scale, shift = inputs
        x = x + gate * F.linear(y, inner)
        normed = (
            F.layer_norm(x, (width,), eps=1e-6) if shape["norm"] == "layer" else F.rms_norm(x, (width,), None, 1e-6)
        )
        return x, F.linear(normed * (1 + scale) + shift, outer)

    return between, (*inputs, given["gate"], given["scale"], given["shift"])


STANDARD = (
    # Wan 1.3B, SD3.5, FLUX and Qwen-Image, Wan 14B: text and image or video.
    (32768, 1536, "layer"),
    (256, 2432, "layer"),
    (4096, 2432, "layer"),
    (256, 3072, "layer"),
    (512, 3072, "layer"),
    (4096, 3072, "layer"),
    (16384, 3072, "layer"),
    (32768, 5120, "layer"),
    # A FLUX with three heads, which the demo and CPU benchmarks run.
    (256, 384, "layer"),
    # LTX, Z-Image.
    (4096, 2048, "rms"),
    (4096, 3840, "rms"),
)
TRIAL = Trial.in_block(shape, alone, block, "tokens width norm", STANDARD)

PROVIDER = Provider("triton", "residual_norm_modulate", run_triton, decline_triton, traced=True)
OP = Op("residual_norm_modulate", reference, draw_samples, (PROVIDER,), results=results, trial=TRIAL)
