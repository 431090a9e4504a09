"""The kernel of `quantize_rows`, and the functions by which other kernels quantize rows as it does."""

import triton
import triton.language as tl


@triton.jit
def rotate(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Rotate groups of 4^STEPS columns: along each axis of size 4 of a group, `sum / 2 - x`."""
    for step in tl.static_range(STEPS):
        axes = tl.reshape(x, [ROWS, BLOCK >> (2 * step + 2), 4, 1 << (2 * step)])
        x = tl.reshape(tl.sum(axes, 2, keep_dims=True) * 0.5 - axes, [ROWS, BLOCK])
    return x


@triton.jit
def magnitude_bits(x):
    """Return the bits of magnitudes: ordered like magnitudes, and those of NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def dynamic_scale(bits, ROWS: tl.constexpr, FLOAT: tl.constexpr, LARGEST: tl.constexpr):
    """Return scales [ROWS, 1] and their reciprocals from the bits of the largest magnitudes, as the reference does."""
    if FLOAT:
        # As in `powers_of_two` of the reference.
        bits = tl.minimum(tl.maximum(bits, 9 << 23), 0x7F800000)
        bits = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        scale = bits.to(tl.float32, bitcast=True)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    else:
        # The smallest normal number, for rows of zeros.
        smallest = tl.full([ROWS, 1], 1 << 23, tl.int32).to(tl.float32, bitcast=True)
        scale = bits.to(tl.float32, bitcast=True) * (1 / LARGEST)
        scale = tl.maximum(scale, smallest, propagate_nan=tl.PropagateNan.ALL)
        inverse = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), scale)
    return scale, inverse


@triton.jit
def static_scale(static_ptr, step_ptr, ROWS: tl.constexpr, LAST: tl.constexpr):
    """Return the static scale as [ROWS, 1], and its reciprocal."""
    if step_ptr is not None:
        static_ptr += tl.minimum(tl.maximum(tl.load(step_ptr), 0), LAST)
    scale = tl.load(static_ptr) + tl.zeros([ROWS, 1], tl.float32)
    return scale, tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), scale)


@triton.jit
def in_8_bits(value, FLOAT: tl.constexpr, LARGEST: tl.constexpr):
    """Return scaled values in the range that is stored, rounded to integers unless they are stored as float8."""
    # Clamped before it is rounded: between a product and a sum, which would become one operation without rounding.
    value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    value = tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if not FLOAT:
        # Adding 1.5 * 2^23 rounds to an integer, half to even.
        value = (value + 12582912.0) - 12582912.0
    return value


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    static_ptr,
    step_ptr,
    q_ptr,
    scale_ptr,
    rows,
    row_stride,
    LAST: tl.constexpr,
    STEPS: tl.constexpr,
    FLOAT: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: rows times width exceeds 2^31 for video.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < WIDTH)
    x = rotate(tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32), ROWS, BLOCK, STEPS)
    if static_ptr is not None:
        scale, inverse = static_scale(static_ptr, step_ptr, ROWS, LAST)
    else:
        scale, inverse = dynamic_scale(tl.max(magnitude_bits(x), axis=1, keep_dims=True), ROWS, FLOAT, LARGEST)
    value = in_8_bits(x * inverse, FLOAT, LARGEST)
    tl.store(q_ptr + row * WIDTH + columns, value.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < rows)
