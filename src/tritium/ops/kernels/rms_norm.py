"""The kernel of `rms_norm`."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    width,
    row_stride,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: rows times width exceeds 2^31 for video.
    first = tl.program_id(0).to(tl.int64) * ROWS
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (columns < width)[None, :]
        x = tl.load(x_ptr + row * row_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + EPS)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
            y = y * weight.to(tl.float32)[None, :]
        tl.store(out_ptr + row * width + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        x_row = x_ptr + first * row_stride
        out_row = out_ptr + first * width
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_row + start + columns, mask=start + columns < width, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, axis=0) / width + EPS)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            y = tl.load(x_row + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
            if HAS_WEIGHT:
                y = y * tl.load(weight_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_row + start + columns, y.to(out_ptr.dtype.element_ty), mask=inside)
