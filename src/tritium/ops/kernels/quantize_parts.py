"""The kernel of `quantize_parts`: activation, concatenation and quantization of a row that stays in registers."""

import triton
import triton.language as tl

from tritium.ops.kernels.quantize_rows import dynamic_scale, in_8_bits, magnitude_bits, rotate, static_scale
from tritium.ops.kernels.residual_norm_modulate import row_start

# Constants of the kernel: the activations of a part.
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
SILU = tl.constexpr(3)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == GELU_TANH:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3).
        x = x * tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
    elif ACTIVATION == GELU:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == SILU:
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def load_columns(start, columns, head_stride, WIDTH: tl.constexpr, HEAD: tl.constexpr):
    """Load a tile of a row in float32, zero beyond the width. Columns of a head are adjacent; heads have a stride."""
    place = start + columns
    if HEAD < WIDTH:
        place = start + (columns // HEAD).to(tl.int64) * head_stride + columns % HEAD
    return tl.load(place, mask=columns < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def part_of_row(
    x_row,
    value_row,
    head_stride,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return one part of a row as a tuple of tiles in float32: activated, gated and rotated."""
    tiles = ()
    for piece in tl.static_range((WIDTH + TILE - 1) // TILE):
        columns = piece * TILE + tl.arange(0, TILE)[None, :]
        x = activated(load_columns(x_row, columns, head_stride, WIDTH, HEAD), ACTIVATION)
        if value_row is not None:
            x = x * load_columns(value_row, columns, 0, WIDTH, WIDTH)
        tiles += (rotate(x, ROWS, TILE, STEPS),)
    return tiles


@triton.jit
def largest_bits(bits, tiles, PIECES: tl.constexpr):
    for piece in tl.static_range(PIECES):
        bits = tl.maximum(bits, magnitude_bits(tiles[piece]))
    return bits


@triton.jit
def store_part(
    start, tiles, inverse, FLOAT: tl.constexpr, LARGEST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    for piece in tl.static_range((WIDTH + TILE - 1) // TILE):
        columns = piece * TILE + tl.arange(0, TILE)[None, :]
        value = in_8_bits(tiles[piece] * inverse, FLOAT, LARGEST)
        tl.store(start + columns, value.to(start.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def quantize_parts_kernel(
    last_ptr,
    first_ptr,
    value_ptr,
    static_ptr,
    step_ptr,
    q_ptr,
    scale_ptr,
    count,
    tokens,
    first_batch,
    first_token,
    first_head,
    last_batch,
    last_token,
    last_head,
    value_batch,
    value_token,
    FIRST_WIDTH: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    FIRST_ACTIVATION: tl.constexpr,
    LAST_WIDTH: tl.constexpr,
    LAST_HEAD: tl.constexpr,
    LAST_ACTIVATION: tl.constexpr,
    LAST: tl.constexpr,
    STEPS: tl.constexpr,
    FLOAT: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    # Inductor passes dynamic sizes in 64 bits, which cost a division; these fit 32.
    tokens, count = tl.cast(tokens, tl.int32), tl.cast(count, tl.int32)
    # Instead of masking rows, the last program repeats the last row and stores the same values again.
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], count - 1)
    first_row = row_start(first_ptr, row, tokens, first_batch, first_token)
    last_row = row_start(last_ptr, row, tokens, last_batch, last_token)
    value_row = row_start(value_ptr, row, tokens, value_batch, value_token)
    q_row = row_start(q_ptr, row, 1, FIRST_WIDTH + LAST_WIDTH, 0)

    bits = tl.zeros([ROWS, TILE], tl.int32)
    first = ()
    if first_ptr is not None:
        first = part_of_row(first_row, None, first_head, FIRST_WIDTH, FIRST_HEAD, FIRST_ACTIVATION, STEPS, ROWS, TILE)
        bits = largest_bits(bits, first, (FIRST_WIDTH + TILE - 1) // TILE)
    last = part_of_row(last_row, value_row, last_head, LAST_WIDTH, LAST_HEAD, LAST_ACTIVATION, STEPS, ROWS, TILE)
    bits = largest_bits(bits, last, (LAST_WIDTH + TILE - 1) // TILE)
    if static_ptr is not None:
        scale, inverse = static_scale(static_ptr, step_ptr, ROWS, LAST)
    else:
        scale, inverse = dynamic_scale(tl.max(bits, axis=1, keep_dims=True), ROWS, FLOAT, LARGEST)
    if first_ptr is not None:
        store_part(q_row, first, inverse, FLOAT, LARGEST, FIRST_WIDTH, TILE)
    store_part(q_row + FIRST_WIDTH, last, inverse, FLOAT, LARGEST, LAST_WIDTH, TILE)
    tl.store(scale_ptr + row, scale)
