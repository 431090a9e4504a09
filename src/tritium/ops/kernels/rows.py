"""Functions that kernels over rows call; `tritium.ops.rows` says how a row is cut into pieces."""

import triton
import triton.language as tl


@triton.jit
def row_start(pointer, row, tokens, batch_stride, token_stride):
    """Where rows [ROWS, 1] begin; None for the pointer None."""
    start = pointer
    if pointer is not None:
        # 64 bits: rows times width passes 2^31 for video.
        start += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
    return start


@triton.jit
def load_piece(start, columns, column_stride, WIDTH: tl.constexpr, HINT: tl.constexpr):
    """A tile of a row in float32, zero beyond the width."""
    # 64 bits: a transposed tensor's columns may lie that far apart.
    place = start + columns.to(tl.int64) * column_stride
    return tl.load(place, mask=columns < WIDTH, other=0.0, eviction_policy=HINT).to(tl.float32)


@triton.jit
def store_row(start, row, WIDTH: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr):
    """The epilogue of every kernel over rows.

    `row` is the finished row in float32, all of it, as a tuple of tiles; it is rounded to the dtype behind `start`. This
    is the one place for fp8: the row's largest magnitude, the scale from it and the rounding belong here.
    """
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + tl.arange(0, TILE)[None, :]
        tl.store(start + columns, row[piece].to(start.dtype.element_ty), mask=columns < WIDTH)
