"""The kernel of `norm_quantize`: the row of `residual_norm_modulate`, quantized before it leaves the registers."""

import triton
import triton.language as tl

from tritium.ops.kernels.quantize_parts import largest_bits, store_part
from tritium.ops.kernels.quantize_rows import dynamic_scale, rotate, static_scale
from tritium.ops.kernels.residual_norm_modulate import load_piece, modulated, residual_piece, row_start, store_row


@triton.jit
def norm_quantize_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    static_ptr,
    step_ptr,
    residual_ptr,
    out_ptr,
    q_ptr,
    rows_ptr,
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
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    LAST: tl.constexpr,
    STEPS: tl.constexpr,
    FLOAT: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    # Inductor passes dynamic sizes in 64 bits, which cost a division; these fit 32.
    tokens, count = tl.cast(tokens, tl.int32), tl.cast(count, tl.int32)
    # Instead of masking rows, the last program repeats the last row and stores the same values again.
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], count - 1)
    x_row = row_start(x_ptr, row, tokens, x_batch, x_token)
    y_row = row_start(y_ptr, row, tokens, y_batch, y_token)
    gate_row = row_start(gate_ptr, row, tokens, gate_batch, gate_token)
    scale_row = row_start(scale_ptr, row, tokens, scale_batch, scale_token)
    shift_row = row_start(shift_ptr, row, tokens, shift_batch, shift_token)
    residual_row = row_start(residual_ptr, row, 1, WIDTH, 0)
    out_row = row_start(out_ptr, row, 1, WIDTH, 0)
    q_row = row_start(q_ptr, row, 1, WIDTH, 0)

    first = tl.arange(0, TILE)[None, :]
    total = tl.zeros([ROWS, TILE], dtype=tl.float32)
    squares = tl.zeros([ROWS, TILE], dtype=tl.float32)
    residual = ()
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + first
        if y_ptr is not None:
            value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH)
        else:
            value = load_piece(x_row, columns, 1, WIDTH, "evict_first")
        residual += (value,)
        total += value
    if y_ptr is not None:
        # Store after the last load: the compiler moves no load above a store.
        store_row(residual_row, residual, WIDTH, TILE, PIECES)
    mean = tl.sum(total, axis=1, keep_dims=True) / WIDTH
    centred = ()
    for piece in tl.static_range(PIECES):
        value = residual[piece]
        if LAYER:
            value = tl.where(piece * TILE + first < WIDTH, value - mean, 0.0)
        centred += (value,)
        squares += value * value
    factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / WIDTH + EPS)
    out = ()
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + first
        value = centred[piece] * factor
        value = modulated(value, weight_ptr, bias_ptr, scale_row, scale_column, shift_row, shift_column, columns, WIDTH)
        out += (value,)
    if out_ptr is not None:
        store_row(out_row, out, WIDTH, TILE, PIECES)
    turned = ()
    for piece in tl.static_range(PIECES):
        turned += (rotate(out[piece], ROWS, TILE, STEPS),)
    if static_ptr is not None:
        rows, inverse = static_scale(static_ptr, step_ptr, ROWS, LAST)
    else:
        bits = largest_bits(tl.zeros([ROWS, TILE], tl.int32), turned, PIECES)
        rows, inverse = dynamic_scale(tl.max(bits, axis=1, keep_dims=True), ROWS, FLOAT, LARGEST)
    store_part(q_row, turned, inverse, FLOAT, LARGEST, WIDTH, TILE)
    tl.store(rows_ptr + row, rows)
