"""The kernel of `channel_norm`, for channels-last tensors."""

import triton
import triton.language as tl


@triton.jit
def channel_norm_kernel(
    x_ptr,
    weight_ptr,
    offset_ptr,
    out_ptr,
    count,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    PIXELS: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    # 64 bits: a batch of video exceeds 2^31 elements.
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
    lanes = tl.arange(0, TILE)[None, :]
    squares = tl.zeros([PIXELS, TILE], dtype=tl.float32)
    held = ()
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + lanes
        inside = (pixel < count) & (columns < CHANNELS)
        x = tl.load(x_ptr + pixel * CHANNELS + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            x += tl.load(offset_ptr + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
        squares += x * x
        held += (x,)
    factor = SCALE / tl.maximum(tl.sqrt(tl.sum(squares, axis=1, keep_dims=True)), EPS)
    for piece in tl.static_range(PIECES):
        columns = piece * TILE + lanes
        inside = (pixel < count) & (columns < CHANNELS)
        weight = tl.load(weight_ptr + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
        y = held[piece] * factor * weight + SHIFT
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(out_ptr + pixel * CHANNELS + columns, y.to(out_ptr.dtype.element_ty), mask=inside)
