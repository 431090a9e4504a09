"""Functions for kernels over rows; `tritium.ops.rows` defines the tiling of a row."""

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
    """Round a row to the dtype of `start` and store it: the epilogue of every kernel over rows.

    `row` is the complete result in float32, as a tuple of tiles. Quantization to fp8 belongs here: the largest magnitude
    of the row, its scale and the rounding.
    """
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + tl.arange(0, TILE)[None, :]
        tl.store(start + columns, row[piece].to(start.dtype.element_ty), mask=columns < WIDTH)
