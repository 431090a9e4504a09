"""GELU, exact or by its tanh approximation, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops import rows
from tritium.ops.launch import NARROW, cannot_launch, remembered, start
from tritium.ops.op import Op, Provider, Sample

# What F.gelu calls its two forms.
FORMS = ("none", "tanh")


def reference(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.gelu(wide, approximate=approximate).to(out_dtype or x.dtype)


def fake(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    del approximate
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(31)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype) * 3

    def arguments(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"x": x, "approximate": approximate, "out_dtype": out_dtype}

    for approximate in FORMS:
        for shape in ((7, 1), (2, 7, 63), (63, 100), (2, 3072), (1, 5120)):
            yield Sample(f"{approximate}, {shape}", arguments(random(*shape), approximate))
        # Tails: where 1 + tanh and 1 + erf cancel, and where the cube leaves the range of half precision.
        tails = torch.linspace(-60, 60, 128, device=device_type).to(dtype)
        yield Sample(f"{approximate}, tails", arguments(tails, approximate))
        wide = arguments(random(2, rows.WHOLE_ROW + 7), approximate)
        yield Sample(f"{approximate}, wider than one program", wide)
    yield Sample("the last columns of a wider tensor", arguments(random(2, 7, 192)[..., 64:], "tanh"))
    yield Sample("transposed", arguments(random(2, 60, 7).transpose(1, 2), "tanh"))
    yield Sample("image", arguments(random(2, 5, 7, 60).movedim(-1, 1), "none"))
    yield Sample("out in float32", arguments(random(3, 60), "tanh", torch.float32))
    yield Sample("no rows", arguments(random(0, 128), "tanh"))


@functools.cache
def _kernel() -> Any:
    import triton.language as tl

    row_start = rows.row_start()
    load_piece = rows.load_piece()
    store_row = rows.store_row()

    # Triton takes annotations for types of its own: only compile-time constants may have one.
    @rows.jit
    def activated(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
        if TANH:
            # (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel for negative u: 2 sqrt(2 / pi) (x + 0.044715 x^3).
            share = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))
        else:
            share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        return x * share

    @rows.jit
    def gelu_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        out_ptr,
        count,
        tokens,
        x_batch,
        x_token,
        TANH: tl.constexpr,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        PIECES: tl.constexpr,
    ):
        # The last program repeats the last row rather than mask rows: it stores the same values again.
        row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], count - 1)
        x_row = row_start(x_ptr, row, tokens, x_batch, x_token)
        out_row = row_start(out_ptr, row, 1, WIDTH, 0)
        first = tl.arange(0, TILE)[None, :]
        if PIECES:
            out = ()
            for piece in tl.static_range(PIECES):
                x = load_piece(x_row, piece * TILE + first, 1, WIDTH, "evict_first")
                out += (activated(x, TANH),)  # type: ignore[assignment]
            store_row(out_row, out, WIDTH, TILE, PIECES)
        else:
            for start in range(0, WIDTH, TILE):
                columns = start + first
                x = load_piece(x_row, columns, 1, WIDTH, "evict_first")
                tl.store(out_row + columns, activated(x, TANH).to(out_ptr.dtype.element_ty), mask=columns < WIDTH)

    return gelu_kernel


def run_triton(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    out = fake(x, approximate, out_dtype)
    if out.numel() == 0:
        return out
    x = rows.as_dense_rows(x, x.shape)
    batches, tokens, width = x.shape
    options = rows.launch_options(width)
    start(
        _kernel(),
        (-(-batches * tokens // options["ROWS"]),),
        x,
        out,
        batches * tokens,
        tokens,
        *x.stride()[:2],
        TANH=approximate == "tanh",
        WIDTH=width,
        **options,
    )
    return out


def decline_triton(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None) -> str | None:
    if approximate not in FORMS:
        return f"the kernel knows the forms {', '.join(FORMS)}, not {approximate!r}"
    if x.dim() == 0:
        return "the kernel works on rows, x has no dim"
    if out_dtype is not None and out_dtype not in NARROW:
        return f"the kernel computes in float32 and cannot write {out_dtype}"
    return cannot_launch(x)


OP = Op(
    name="gelu",
    schema="(Tensor x, str approximate, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(Provider("triton", "gelu", remembered(run_triton), decline_triton),),
)
