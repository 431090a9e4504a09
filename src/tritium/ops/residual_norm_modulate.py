"""A gated residual, the norm of it and its modulation: `r = x + gate * y`, `norm(r) * (1 + scale) + shift`; both results.

Computed in float32 (float64 for float64), each result rounded once; the norm sees the rounded residual, as the next
layer will. `norm` is "layer" or "rms", weight and bias are its own. x and y have one shape [..., H]; gate, scale and
shift are broadcast against it and have no say in the results' dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops import rows
from tritium.ops.launch import NARROW, cannot_launch, remembered, start
from tritium.ops.op import NARROW as NARROW_PROJECTION
from tritium.ops.op import Draw, Op, Provider, Sample, Shape, Trial, count, octave, present

NORMS = ("layer", "rms")


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
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    added = y.to(wide) if gate is None else gate.to(wide) * y.to(wide)
    residual = (x.to(wide) + added).to(residual_dtype or narrow)
    value = _normed(residual.to(wide), eps, norm)
    if weight is not None:
        value = value * weight.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    if scale is not None:
        value = value * (1 + scale.to(wide))
    if shift is not None:
        value = value + shift.to(wide)
    return residual, value.to(out_dtype or residual.dtype)


def _normed(value: torch.Tensor, eps: float, norm: str) -> torch.Tensor:
    if norm == "layer":
        return F.layer_norm(value, (value.shape[-1],), None, None, eps)
    if norm == "rms":
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}")


def fake(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del gate, weight, bias, scale, shift, eps, norm
    residual = x.new_empty(x.shape, dtype=residual_dtype or torch.promote_types(x.dtype, y.dtype))
    return residual, x.new_empty(x.shape, dtype=out_dtype or residual.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(29)

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32)

    def random(*shape: int) -> torch.Tensor:
        return wide(*shape).to(dtype)

    def arguments(x: torch.Tensor, modulation: tuple[int, ...], norm: str, **others: Any) -> dict[str, Any]:
        """Without weight and bias, unless `others` has them."""
        own: dict[str, Any] = {"x": x, "y": random(*x.shape), "gate": random(*modulation), "weight": None, "bias": None}
        own |= {"scale": random(*modulation), "shift": random(*modulation), "eps": 1e-6, "norm": norm}
        return {**own, "residual_dtype": None, "out_dtype": None, **others}

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
        modulation = (batch, 1, width)
        label = f"{norm}, {tokens} tokens of {width}"
        yield Sample(label, arguments(random(batch, tokens, width), modulation, norm))
    none = {"gate": None, "scale": None, "shift": None}
    affine = {"weight": random(100), "bias": random(100)}
    yield Sample("a plain residual and norm", arguments(random(2, 7, 100), (100,), "layer", **none, **affine))
    yield Sample("everything", arguments(random(2, 7, 100), (2, 1, 100), "layer", **affine))
    yield Sample("one gate for all, no shift", arguments(random(2, 7, 60), (1, 1, 60), "rms", shift=None))
    yield Sample("modulation of rank 1, no scale", arguments(random(2, 7, 60), (60,), "layer", scale=None))
    yield Sample("modulation a token", arguments(random(2, 7, 60), (2, 7, 60), "rms", weight=random(60)))
    yield Sample("one value a token", arguments(random(2, 7, 60), (2, 7, 1), "layer"))
    yield Sample("two batches in one program", arguments(random(5, 3, 60), (5, 1, 60), "layer"))
    floats = {"gate": wide(2, 1, 1536), "scale": wide(2, 1, 1536), "shift": wide(2, 1, 1536)}
    yield Sample("Wan: modulation in float32", arguments(random(2, 3, 1536), (1536,), "layer", **floats))
    chunks = random(2, 6 * 128)[:, None].chunk(6, -1)
    parts = {"shift": chunks[0], "scale": chunks[1], "gate": chunks[2]}
    yield Sample("chunks of one modulation", arguments(random(2, 7, 128), (128,), "layer", **parts))
    sliced = random(2, 12, 64)[:, 5:]
    yield Sample("tokens of a longer sequence", arguments(random(2, 7, 128)[..., 64:], (2, 1, 64), "rms", y=sliced))
    heads = random(2, 3, 7, 64).transpose(1, 2)
    yield Sample("heads", arguments(random(2, 7, 3, 64), (2, 7, 1, 64), "layer", y=heads))
    transposed = random(2, 60, 7).transpose(1, 2)
    yield Sample("transposed", arguments(transposed, (2, 1, 60), "layer", gate=random(60, 2, 1).permute(1, 2, 0)))
    yield Sample("one row", arguments(random(128), (128,), "rms"))
    yield Sample("residual in float32", arguments(random(3, 60), (60,), "rms", residual_dtype=torch.float32))
    yield Sample("out in bfloat16", arguments(random(3, 60), (3, 60), "layer", out_dtype=torch.bfloat16))
    yield Sample("no tokens", arguments(random(2, 0, 128), (2, 1, 128), "layer"))
    for norm in NORMS:
        wider = arguments(random(2, rows.WHOLE_ROW + 7), (rows.WHOLE_ROW + 7,), norm)
        yield Sample(f"{norm}, wider than one program", wider)


@functools.cache
def _residual_piece() -> Any:
    import triton.language as tl

    load_piece = rows.load_piece()

    # Triton takes annotations for types of its own: only compile-time constants may have one.
    @rows.jit
    def residual_piece(  # type: ignore[no-untyped-def]
        x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH: tl.constexpr
    ):
        """A tile of the residual, rounded and widened again."""
        # Nobody reads x and y again here: the modulation, which every row reads, is worth more in the cache.
        x = load_piece(x_row, columns, 1, WIDTH, "evict_first")
        y = load_piece(y_row, columns, 1, WIDTH, "evict_first")
        if gate_row is not None:
            y = y * load_piece(gate_row, columns, gate_column, WIDTH, "")
        return (x + y).to(residual_row.dtype.element_ty).to(tl.float32)

    return residual_piece


@functools.cache
def _modulated() -> Any:
    import triton.language as tl

    load_piece = rows.load_piece()

    @rows.jit
    def modulated(  # type: ignore[no-untyped-def]
        value,
        weight_ptr,
        bias_ptr,
        scale_row,
        scale_column,
        shift_row,
        shift_column,
        columns,
        WIDTH: tl.constexpr,
    ):
        if weight_ptr is not None:
            value = value * load_piece(weight_ptr, columns, 1, WIDTH, "")
        if bias_ptr is not None:
            value = value + load_piece(bias_ptr, columns, 1, WIDTH, "")
        if scale_row is not None:
            value = value * (1 + load_piece(scale_row, columns, scale_column, WIDTH, ""))
        if shift_row is not None:
            value = value + load_piece(shift_row, columns, shift_column, WIDTH, "")
        return value

    return modulated


@functools.cache
def _kernel() -> Any:
    import triton.language as tl

    row_start = rows.row_start()
    store_row = rows.store_row()
    residual_piece = _residual_piece()
    modulated = _modulated()

    @rows.jit
    def residual_norm_modulate_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        y_ptr,
        gate_ptr,
        weight_ptr,
        bias_ptr,
        scale_ptr,
        shift_ptr,
        residual_ptr,
        out_ptr,
        eps,
        count,
        tokens,
        x_batch,
        x_token,
        y_batch,
        y_token,
        gate_batch,
        gate_token,
        gate_column,
        scale_batch,
        scale_token,
        scale_column,
        shift_batch,
        shift_token,
        shift_column,
        LAYER: tl.constexpr,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        PIECES: tl.constexpr,
    ):
        # The last program repeats the last row rather than mask rows: it stores the same values again.
        row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], count - 1)
        x_row = row_start(x_ptr, row, tokens, x_batch, x_token)
        y_row = row_start(y_ptr, row, tokens, y_batch, y_token)
        gate_row = row_start(gate_ptr, row, tokens, gate_batch, gate_token)
        scale_row = row_start(scale_ptr, row, tokens, scale_batch, scale_token)
        shift_row = row_start(shift_ptr, row, tokens, shift_batch, shift_token)
        residual_row = row_start(residual_ptr, row, 1, WIDTH, 0)
        out_row = row_start(out_ptr, row, 1, WIDTH, 0)

        first = tl.arange(0, TILE)[None, :]
        total = tl.zeros([ROWS, TILE], dtype=tl.float32)
        squares = tl.zeros([ROWS, TILE], dtype=tl.float32)
        if PIECES:
            residual = ()
            for piece in tl.static_range(PIECES):
                columns = piece * TILE + first
                value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH)
                residual += (value,)  # type: ignore[assignment]
                total += value
            # After the last load: no load can be moved above a store.
            store_row(residual_row, residual, WIDTH, TILE, PIECES)
            mean = tl.sum(total, axis=1, keep_dims=True) / WIDTH
            centred = ()
            for piece in tl.static_range(PIECES):
                value = residual[piece]
                if LAYER:
                    value = tl.where(piece * TILE + first < WIDTH, value - mean, 0.0)
                centred += (value,)  # type: ignore[assignment]
                squares += value * value
            factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / WIDTH + eps)
            out = ()
            for piece in tl.static_range(PIECES):
                value = modulated(
                    centred[piece] * factor,
                    weight_ptr,
                    bias_ptr,
                    scale_row,
                    scale_column,
                    shift_row,
                    shift_column,
                    piece * TILE + first,
                    WIDTH,
                )
                out += (value,)  # type: ignore[assignment]
            store_row(out_row, out, WIDTH, TILE, PIECES)
        else:
            # Each pass computes the residual again: what another thread stored could not be read without a barrier.
            if LAYER:
                for start in range(0, WIDTH, TILE):
                    total += residual_piece(x_row, y_row, gate_row, gate_column, residual_row, start + first, WIDTH)
            mean = tl.sum(total, axis=1, keep_dims=True) / WIDTH
            for start in range(0, WIDTH, TILE):
                columns = start + first
                value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH) - mean
                value = tl.where(columns < WIDTH, value, 0.0)
                squares += value * value
            factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / WIDTH + eps)
            for start in range(0, WIDTH, TILE):
                columns = start + first
                value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH)
                tl.store(residual_row + columns, value.to(residual_ptr.dtype.element_ty), mask=columns < WIDTH)
                value = modulated(
                    (value - mean) * factor,
                    weight_ptr,
                    bias_ptr,
                    scale_row,
                    scale_column,
                    shift_row,
                    shift_column,
                    columns,
                    WIDTH,
                )
                tl.store(out_row + columns, value.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)

    return residual_norm_modulate_kernel


def run_triton(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, out = fake(x, y, gate, weight, bias, scale, shift, eps, norm, residual_dtype, out_dtype)
    if out.numel() == 0:
        return residual, out
    shape = x.shape
    x, y = rows.as_dense_rows(x, shape), rows.as_dense_rows(y, shape)
    gate, scale, shift = (None if part is None else rows.as_rows(part, shape) for part in (gate, scale, shift))
    weight, bias = (None if part is None else part.expand(shape[-1]).contiguous() for part in (weight, bias))
    batches, tokens, width = x.shape
    options = rows.launch_options(width)
    start(
        _kernel(),
        (-(-batches * tokens // options["ROWS"]),),
        x,
        y,
        gate,
        weight,
        bias,
        scale,
        shift,
        residual,
        out,
        float(eps),
        batches * tokens,
        tokens,
        *x.stride()[:2],
        *y.stride()[:2],
        *_strides(gate),
        *_strides(scale),
        *_strides(shift),
        LAYER=norm == "layer",
        WIDTH=width,
        **options,
    )
    return residual, out


def _strides(rows_of: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if rows_of is None else rows_of.stride()


def decline_triton(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> str | None:
    del eps
    if norm not in NORMS:
        return f"the kernel knows the norms {', '.join(NORMS)}, not {norm!r}"
    if x.dim() == 0 or x.dim() != y.dim():
        return f"the kernel takes x and y of one shape [..., H], got ranks {x.dim()} and {y.dim()}"
    if any(part.dim() > x.dim() for part in (gate, scale, shift) if part is not None):
        return f"the kernel broadcasts gate, scale and shift against x, which has rank {x.dim()} only"
    wide = [str(dtype) for dtype in (residual_dtype, out_dtype) if dtype is not None and dtype not in NARROW]
    if wide:
        return f"the kernel computes in float32 and cannot write {', '.join(wide)}"
    return cannot_launch(x, y, gate, weight, bias, scale, shift)


def shape(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> Shape:
    del y, gate, weight, bias, scale, shift, eps, residual_dtype, out_dtype
    return {"tokens": octave(count(x.shape[:-1])), "width": present(x.shape[-1]), "norm": norm}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    x, y = (draw(1, shape["tokens"], shape["width"]) for _ in "xy")
    gate, scale, shift = draw(1, 1, 3 * shape["width"]).chunk(3, -1)
    return {
        "x": x,
        "y": y,
        "gate": gate,
        "weight": None,
        "bias": None,
        "scale": scale,
        "shift": shift,
        "eps": 1e-6,
        "norm": shape["norm"],
        "residual_dtype": None,
        "out_dtype": None,
    }


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """What stands between two projections of a transformer block: here they are narrow."""
    given = alone(shape, draw)
    width = shape["width"]
    inner, outer = draw(width, NARROW_PROJECTION) / NARROW_PROJECTION**0.5, draw(NARROW_PROJECTION, width) / width**0.5
    inputs = (given["x"], draw(1, shape["tokens"], NARROW_PROJECTION), inner, outer)

    def between(
        x: torch.Tensor,
        y: torch.Tensor,
        inner: torch.Tensor,
        outer: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + gate * F.linear(y, inner)
        normed = (
            F.layer_norm(x, (width,), eps=1e-6) if shape["norm"] == "layer" else F.rms_norm(x, (width,), None, 1e-6)
        )
        return x, F.linear(normed * (1 + scale) + shift, outer)

    return between, (*inputs, given["gate"], given["scale"], given["shift"])


TRIAL = Trial(
    shape,
    alone,
    block,
    standard=tuple(
        {"tokens": tokens, "width": width, "norm": norm}
        for tokens, width, norm in (
            # Wan 1.3B, SD3.5, FLUX and Qwen-Image, Wan 14B: text and image or video.
            (32768, 1536, "layer"),
            (256, 2432, "layer"),
            (4096, 2432, "layer"),
            (256, 3072, "layer"),
            (512, 3072, "layer"),
            (4096, 3072, "layer"),
            (16384, 3072, "layer"),
            (32768, 5120, "layer"),
            # LTX, Z-Image.
            (4096, 2048, "rms"),
            (4096, 3840, "rms"),
        )
    ),
)

OP = Op(
    name="residual_norm_modulate",
    schema=(
        "(Tensor x, Tensor y, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, float eps, "
        "str norm, ScalarType? residual_dtype, ScalarType? out_dtype) -> (Tensor, Tensor)"
    ),
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(Provider("triton", "residual_norm_modulate", remembered(run_triton), decline_triton),),
    trial=TRIAL,
)
