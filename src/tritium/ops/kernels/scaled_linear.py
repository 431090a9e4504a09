"""The kernel of `scaled_linear`."""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return a program's tile: those that run at the same time share rows of the weight in the cache."""
    first_m = program // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    return first_m + program % (GROUP * tiles_n) % group, program % (GROUP * tiles_n) // group


@triton.jit
def store_tile(
    total,
    scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    row,
    column,
    count,
    N: tl.constexpr,
    GELU: tl.constexpr,
):
    """Apply scales, bias and activation to the sums of a tile, and store it."""
    scale = tl.load(scale_ptr + row, mask=row < count, other=0.0)
    weight_scale = tl.load(weight_scale_ptr + column, mask=column < N, other=0.0)
    out = total.to(tl.float32) * scale[:, None] * weight_scale[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GELU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3).
        out = out * tl.sigmoid(1.5957691216057308 * out * (1 + 0.044715 * out * out))
    place = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(row < count)[:, None] & (column < N)[None, :])


@triton.jit
def scaled_linear_kernel(
    q_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    count,
    q_stride,
    weight_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Inductor passes dynamic sizes in 64 bits, which cost a division; this one fits 32.
    count = tl.cast(count, tl.int32)
    tiles_m, tiles_n = tl.cdiv(count, BLOCK_M), tl.cdiv(N, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # int8 products are summed exactly, in int32.
    accumulator: tl.constexpr = tl.int32 if q_ptr.dtype.element_ty == tl.int8 else tl.float32
    if TMA:
        # Descriptors by which the hardware copies whole tiles, and fills those that reach over the end with zeros.
        q_tiles = tl.make_tensor_descriptor(q_ptr, [count, K], [q_stride, 1], [BLOCK_M, BLOCK_K])
        weight_tiles = tl.make_tensor_descriptor(weight_ptr, [N, K], [weight_stride, 1], [BLOCK_N, BLOCK_K])
    # With PROGRAMS, each computes several tiles: the loads of the next one start while a tile is stored.
    step = PROGRAMS if PROGRAMS else tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, step, flatten=PROGRAMS > 0):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns past the end read the first ones again, and are not stored. 64 bits: rows times K exceeds 2^31.
        q = q_ptr + (row % count).to(tl.int64)[:, None] * q_stride + inner[None, :]
        weight = weight_ptr + (column % N).to(tl.int64)[None, :] * weight_stride + inner[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], accumulator)
        for start in range(0, K, BLOCK_K):
            if TMA:
                left = q_tiles.load([tile_m * BLOCK_M, start])
                right = weight_tiles.load([tile_n * BLOCK_N, start]).T
            elif K % BLOCK_K == 0:
                left, right = tl.load(q + start), tl.load(weight + start)
            else:
                left = tl.load(q + start, mask=start + inner[None, :] < K, other=0.0)
                right = tl.load(weight + start, mask=start + inner[:, None] < K, other=0.0)
            total = tl.dot(left, right, total, out_dtype=accumulator)
        store_tile(total, scale_ptr, weight_scale_ptr, bias_ptr, out_ptr, row, column, count, N, GELU)
