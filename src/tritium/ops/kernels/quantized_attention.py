"""The kernels of attention in 8 bits: `quantize_heads_kernel` stores q, k and v, `quantized_attention_kernel` computes."""

import triton
import triton.language as tl

from tritium.ops.kernels.quantize_rows import dynamic_scale, in_8_bits, magnitude_bits, static_scale

# The columns of a group that is rotated.
GROUP = tl.constexpr(64)

# As in `ops.attention.rounded`: the exponent of the largest weight, and the bits of LEAST_VALUE.
RAISED = tl.constexpr(8.0)
LEAST_VALUE_BITS = tl.constexpr((127 - 32) << 23)


@triton.jit
def hadamard():
    """Return the regular Hadamard matrix of 64: +-1/8, negative where an odd number of base-4 digits are equal."""
    digits = tl.arange(0, GROUP)[:, None] ^ tl.arange(0, GROUP)[None, :]
    equal = ~(digits | (digits >> 1))
    parity = (equal ^ (equal >> 2) ^ (equal >> 4)) & 1
    return 0.125 - 0.25 * parity.to(tl.float32)


@triton.jit
def quantize_heads_kernel(
    x_ptr,
    mean_ptr,
    static_ptr,
    q_ptr,
    scale_ptr,
    tokens,
    heads,
    x_batch,
    x_head,
    x_token,
    tiles,
    FACTOR: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROTATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLOAT: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store a tile of one head in 8 bits, with zeros for tokens past the end, and a scale per row or one for the tile.

    A static scale is the same for all tiles.
    """
    tile, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = x_ptr + (number // heads) * x_batch + (number % heads) * x_head
    token, column = tile * TILE + tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    x = tl.load(start + token.to(tl.int64) * x_token + column, mask=inside, other=0.0)
    if mean_ptr is not None:
        moved = tl.where(inside, x.to(tl.float32) - tl.load(mean_ptr + number * WIDTH + column), 0.0)
        x = moved.to(x.dtype)
    if ROTATED:
        matrix = hadamard() if WIDEN else hadamard().to(x.dtype)
        groups = tl.reshape(x.to(tl.float32) if WIDEN else x, [TILE * WIDTH // GROUP, GROUP])
        # Exact products: both are in 16 bits, and the matrix holds powers of two.
        value = tl.reshape(tl.dot(groups, matrix, input_precision="ieee"), [TILE, WIDTH])
    else:
        value = x.to(tl.float32)
    if static_ptr is not None:
        scale, inverse = static_scale(static_ptr, None, 1, 0)
    else:
        bits = tl.max(magnitude_bits(value), axis=1, keep_dims=True)
        if not PER_ROW:
            bits = tl.max(bits, axis=0, keep_dims=True)
        if TRANSPOSED:
            bits = tl.maximum(bits, LEAST_VALUE_BITS)
        scale, inverse = dynamic_scale(bits, TILE if PER_ROW else 1, FLOAT, LARGEST)
    stored = in_8_bits(value * inverse, FLOAT, LARGEST).to(q_ptr.dtype.element_ty)
    padded = tiles * TILE
    if TRANSPOSED:
        key = tile * TILE + tl.arange(0, TILE)[None, :]
        place = q_ptr + (number * WIDTH + tl.arange(0, WIDTH)[:, None]) * padded + key
        tl.store(place, tl.trans(stored))
    else:
        tl.store(q_ptr + (number * padded + token) * WIDTH + column, stored)
    if PER_ROW:
        tl.store(scale_ptr + number * padded + token, scale * FACTOR)
    elif static_ptr is None:
        one = tl.zeros([1, 1], tl.int32)
        tl.store(scale_ptr + number * tiles + tile + one, scale * FACTOR)


@triton.jit
def scores(q, k, WIDEN: tl.constexpr):
    """Return products in float32."""
    if WIDEN:
        score = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    elif q.dtype == tl.int8:
        # The bits of 1.5 * 2^23 plus an integer below 2^22 are those of the sum as float32: conversions are slower.
        score = (tl.dot(q, k, out_dtype=tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    else:
        score = tl.dot(q, k)
    return score


@triton.jit
def add_tile(score, seen, factor, v, v_ratio, largest, total, out, ROUNDED: tl.constexpr, WIDEN: tl.constexpr):
    """Add a tile of keys to an online softmax; `v_ratio` turns earlier sums into multiples of this tile's scale."""
    if seen is None:
        now = tl.maximum(largest, tl.max(score, 1) * factor)
    else:
        now = tl.maximum(largest, tl.max(tl.where(seen, score, float("-inf")), 1) * factor)
    weight = tl.exp2(score * factor[:, None] - (now - RAISED)[:, None])
    if seen is not None:
        weight = tl.where(seen, weight, 0.0)
    shrink = tl.exp2(largest - now)
    stored = weight.to(v.dtype)
    if ROUNDED:
        # Of 16-bit weights too: their rounding counts in the same way.
        weight = stored.to(tl.float32)
    total = total * shrink + tl.sum(weight, 1)
    weight = stored
    if WIDEN:
        weight = weight.to(tl.float32)
        v = v.to(tl.float32)
    # Tensor cores add float8 products in 22 bits or less: a tile's sums start at zero, and are added here in float32.
    part = tl.dot(weight, v, input_precision="ieee" if WIDEN else "tf32")
    return now, total, out * (shrink * v_ratio)[:, None] + part


@triton.jit
def quantized_attention_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    v_ptr,
    v_scale_ptr,
    out_ptr,
    queries,
    keys,
    heads,
    q_tiles,
    k_tiles,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    ROUNDED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute BLOCK queries of one head. A head's blocks follow each other, so that they read its keys from the cache.

    Values are float8 and transposed, with scales, or 16 bits without. TMA: the hardware copies tiles by descriptors.
    ROUNDED: the total is that of the rounded weights.
    """
    # Inductor passes dynamic sizes in 64 bits; these fit 32.
    keys, queries, k_tiles = tl.cast(keys, tl.int32), tl.cast(queries, tl.int32), tl.cast(k_tiles, tl.int32)
    # 64 bits: keys times the stride of a token exceeds 2^31 for video.
    v_token = tl.cast(v_token, tl.int64)
    block, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, key = tl.arange(0, WIDTH), tl.arange(0, STEP)
    row = block * BLOCK + tl.arange(0, BLOCK)
    q_start, k_start = q_ptr + number * q_tiles * (TILE * WIDTH), k_ptr + number * k_tiles * (TILE * WIDTH)
    q = tl.load(q_start + row[:, None] * WIDTH + column[None, :])
    row_scale = tl.load(q_scale_ptr + number * q_tiles * TILE + row)
    k_place = k_start + key[None, :] * WIDTH + column[:, None]
    k_scale_ptr += number * k_tiles
    if v_scale_ptr is not None:
        v_scale_ptr += number * k_tiles
        v_start = v_ptr + number * WIDTH * (k_tiles * TILE)
        v_place = v_start + column[None, :] * (k_tiles * TILE) + key[:, None]
    else:
        v_start = v_ptr + (number // heads) * v_batch + (number % heads) * v_head
        v_place = v_start + key[:, None] * v_token + column[None, :]
    if TMA:
        k_table = tl.make_tensor_descriptor(k_start, [k_tiles * TILE, WIDTH], [WIDTH, 1], [STEP, WIDTH])
        v_table = tl.make_tensor_descriptor(v_start, [WIDTH, k_tiles * TILE], [k_tiles * TILE, 1], [WIDTH, STEP])

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    # Scales of the next tile, so that no load waits for another.
    v_scale = 1.0
    v_next = 1.0
    v_ratio = 1.0
    k_next = tl.load(k_scale_ptr)
    if v_scale_ptr is not None:
        v_next = tl.load(v_scale_ptr)
    whole = keys // STEP * STEP
    for first in tl.range(0, whole, STEP):
        if TMA:
            k, v = k_table.load([first, 0]).T, v_table.load([0, first]).T
        else:
            k = tl.load(k_place + first * WIDTH)
            v = tl.load(v_place + (first if v_scale_ptr is not None else first * v_token))
        factor = row_scale * k_next
        following = tl.minimum((first + STEP) // TILE, k_tiles - 1)
        k_next = tl.load(k_scale_ptr + following)
        if v_scale_ptr is not None:
            v_ratio, v_scale = v_scale / v_next, v_next
            v_next = tl.load(v_scale_ptr + following)
        score = scores(q, k, WIDEN)
        largest, total, out = add_tile(score, None, factor, v, v_ratio, largest, total, out, ROUNDED, WIDEN)
    if whole < keys:
        seen = whole + key < keys
        score = scores(q, tl.load(k_place + whole * WIDTH), WIDEN)
        if v_scale_ptr is not None:
            v = tl.load(v_place + whole)
            v_ratio, v_scale = v_scale / v_next, v_next
        else:
            v = tl.load(v_place + whole * v_token, mask=seen[:, None], other=0.0)
        largest, total, out = add_tile(
            score, seen[None, :], row_scale * k_next, v, v_ratio, largest, total, out, ROUNDED, WIDEN
        )

    out = out * (v_scale / total)[:, None]
    out_start = out_ptr + (number // heads) * out_batch + (number % heads) * out_head
    place = out_start + row[:, None].to(tl.int64) * out_token + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(row < queries)[:, None])
