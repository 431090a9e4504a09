"""The kernel of `residual_norm_modulate`."""

import triton
import triton.language as tl


@triton.jit
def row_start(pointer, row, tokens, batch_stride, token_stride):
    """Return pointers to the starts of rows [ROWS, 1]; None if the pointer is None."""
    start = pointer
    if pointer is not None:
        # 64 bits: rows times width exceeds 2^31 for video.
        start += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    return start


@triton.jit
def load_piece(start, columns, column_stride, WIDTH: tl.constexpr, HINT: tl.constexpr):
    """Load a tile of a row in float32, zero beyond the width."""
    # 64 bits: column strides of transposed tensors can be that large.
    place = start + columns.to(tl.int64) * column_stride
    return tl.load(place, mask=columns < WIDTH, other=0.0, eviction_policy=HINT).to(tl.float32)


@triton.jit
def store_row(start, row, WIDTH: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr):
    """Round a row, a tuple of tiles in float32, to the dtype of `start` and store it."""
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + tl.arange(0, TILE)[None, :]
        tl.store(start + columns, row[piece].to(start.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH: tl.constexpr):
    """Return a tile of the residual in float32, rounded to the residual's dtype."""
    # Evict x and y first: this kernel reads them once, but every row reads the modulation.
    x = load_piece(x_row, columns, 1, WIDTH, "evict_first")
    y = load_piece(y_row, columns, 1, WIDTH, "evict_first")
    if gate_row is not None:
        y = y * load_piece(gate_row, columns, gate_column, WIDTH, "")
    return (x + y).to(residual_row.dtype.element_ty).to(tl.float32)


@triton.jit
def modulated(
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


@triton.jit
def residual_norm_modulate_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    residual_ptr,
    out_ptr,
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

    first = tl.arange(0, TILE)[None, :]
    total = tl.zeros([ROWS, TILE], dtype=tl.float32)
    squares = tl.zeros([ROWS, TILE], dtype=tl.float32)
    if PIECES:
        residual = ()
        for piece in tl.static_range(PIECES):
            columns = piece * TILE + first
            value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH)
            residual += (value,)
            total += value
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
            out += (value,)
        store_row(out_row, out, WIDTH, TILE, PIECES)
    else:
        # Each pass recomputes the residual: reading values stored by other threads would need a barrier.
        if LAYER:
            for start in range(0, WIDTH, TILE):
                total += residual_piece(x_row, y_row, gate_row, gate_column, residual_row, start + first, WIDTH)
        mean = tl.sum(total, axis=1, keep_dims=True) / WIDTH
        for start in range(0, WIDTH, TILE):
            columns = start + first
            value = residual_piece(x_row, y_row, gate_row, gate_column, residual_row, columns, WIDTH) - mean
            value = tl.where(columns < WIDTH, value, 0.0)
            squares += value * value
        factor = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / WIDTH + EPS)
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
