"""`residual_norm_modulate` on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritium.ops import rows
from tritium.ops.launch import NARROW, cannot_launch, start
from tritium.ops.residual_norm_modulate.arguments import decline_form
from tritium.ops.residual_norm_modulate.reference import fake


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
    reason = decline_form(x, y, (gate, scale, shift), norm)
    if reason is not None:
        return reason
    wide = [str(dtype) for dtype in (residual_dtype, out_dtype) if dtype is not None and dtype not in NARROW]
    if wide:
        return f"the kernel computes in float32 and cannot write {', '.join(wide)}"
    return cannot_launch(x, y, gate, weight, bias, scale, shift)
