"""The kernels of `group_norm_silu`."""

import triton
import triton.language as tl


# Combine means and sums of squared deviations: sums of squares would lose all digits for values far from zero.
@triton.jit
def merged(count, mean, squares, axis: tl.constexpr):
    total = tl.sum(count, axis=axis)
    known = tl.maximum(total, 1.0)
    center = tl.sum(count * mean, axis=axis) / known
    # If the mean is large, the first quotient has the rounding error of a large sum; the second corrects it.
    center += tl.sum(count * (mean - tl.expand_dims(center, axis)), axis=axis) / known
    apart = mean - tl.expand_dims(center, axis)
    return total, center, tl.sum(squares + count * apart * apart, axis=axis)


@triton.jit
def moments(partials_ptr, plane, first, parts, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mean and the reciprocal standard deviation of a group from its partial results."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        places = partials_ptr + first + start + lanes
        inside = start + lanes < parts
        found = tl.load(places, mask=inside, other=0.0)
        apart = tl.load(places + plane, mask=inside, other=0.0) - mean
        squares += tl.load(places + 2 * plane, mask=inside, other=0.0)
        total = count + found
        share = found / tl.maximum(total, 1.0)
        squares += apart * apart * count * share
        mean += apart * share
        count = total
    total, center, deviations = merged(count, mean, squares, 0)
    return center, tl.rsqrt(deviations / total + EPS)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def group_norm_silu_whole_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    offset_ptr,
    out_ptr,
    channels,
    pixels,
    groups,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    group_channels = channels // groups
    run = group_channels * pixels
    lanes = tl.arange(0, BLOCK)
    inside = lanes < run
    first_channel = row % groups * group_channels
    # 64 bits: a batch of video exceeds 2^31 elements.
    if CHANNELS_LAST:
        channel = lanes % group_channels
        places = lanes // group_channels * channels + channel
        first = (row // groups).to(tl.int64) * channels * pixels + first_channel
    else:
        channel = lanes // pixels
        places = lanes
        first = row.to(tl.int64) * run
    x = tl.load(x_ptr + first + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        x += tl.load(offset_ptr + first_channel + channel, mask=inside, other=0.0).to(tl.float32)
    _, mean, squares = merged(inside.to(tl.float32), x, tl.zeros([BLOCK], dtype=tl.float32), 0)
    y = (x - mean) * tl.rsqrt(squares / run + EPS)
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + first_channel + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + first_channel + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + places, silu(y).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_silu_statistics_kernel(
    x_ptr,
    offset_ptr,
    partials_ptr,
    length,
    width,
    parts,
    steps,
    apart_by,
    further,
    units,
    plane,
    channels,
    HAS_OFFSET: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store count, mean and squared deviations of every `UNIT` adjacent columns of a matrix.

    With an offset each column is one channel, or the whole matrix with PLANES. An offset moves the means and leaves the
    deviations unchanged.

    A part is up to `steps` tiles: its first is `apart_by` tiles after that of the previous part, and `further` is the
    distance between its tiles.
    """
    blocks = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks % parts
    matrix = (tl.program_id(0) // blocks // parts).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, ROWS)[:, None] * width + columns[None, :]
    known = (columns < width)[None, :]
    stride = ROWS * width
    tiles = length // stride
    first = part.to(tl.int64) * apart_by
    full = tl.minimum((tl.maximum(tiles - first, 0) + further - 1) // further, steps).to(tl.int32)
    x_part = x_ptr + matrix * length + first * stride
    onwards = tl.cast(further, tl.int64) * stride
    mean = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(full):
        x = tl.load(x_part + places, mask=known, other=0.0).to(tl.float32)
        apart = x - mean
        mean += apart * (1.0 / (step + 1))
        squares += apart * (x - mean)
        x_part += onwards
    count = tl.zeros([ROWS, COLUMNS], dtype=tl.float32) + full
    # Only one part reads the remainder after the last full tile.
    if (full < steps) & (first + full.to(tl.int64) * further == tiles):
        inside = (places < length - tiles * stride) & known
        x = tl.load(x_part + places, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, x - mean, 0.0)
        mean += apart * (1.0 / (full + 1))
        squares += apart * (x - mean)
        count += inside.to(tl.float32)
    if HAS_OFFSET:
        if PLANES:
            mean += tl.load(offset_ptr + matrix % channels).to(tl.float32)
        else:
            mean += tl.load(offset_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    # Combine adjacent columns first: one thread holds them, and fewer values remain to exchange between threads.
    count = tl.reshape(count, [ROWS, COLUMNS // UNIT, UNIT])
    mean = tl.reshape(mean, [ROWS, COLUMNS // UNIT, UNIT])
    squares = tl.reshape(squares, [ROWS, COLUMNS // UNIT, UNIT])
    count, mean, squares = merged(count, mean, squares, 2)
    count, mean, squares = merged(count, mean, squares, 0)
    unit = block * (COLUMNS // UNIT) + tl.arange(0, COLUMNS // UNIT)
    made = partials_ptr + (matrix * units + unit) * parts + part
    tl.store(made, count, mask=unit < units)
    tl.store(made + plane, mean, mask=unit < units)
    tl.store(made + 2 * plane, squares, mask=unit < units)


@triton.jit
def group_norm_silu_combine_kernel(
    partials_ptr,
    moments_ptr,
    parts,
    plane,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean, scale = moments(partials_ptr, plane, row * parts, parts, EPS, BLOCK)
    tl.store(moments_ptr + 2 * row, mean)
    tl.store(moments_ptr + 2 * row + 1, scale)


@triton.jit
def group_norm_silu_planes_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    offset_ptr,
    partials_ptr,
    out_ptr,
    channels,
    pixels,
    group_channels,
    parts,
    plane,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    # Inductor passes dynamic sizes in 64 bits, which cost a division; these fit 32.
    pixels = tl.cast(pixels, tl.int32)
    tiles = tl.cdiv(pixels, BLOCK)
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    places = row * pixels + tile * BLOCK + lanes
    inside = lanes < pixels - tile * BLOCK
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    mean, scale = moments(partials_ptr, plane, row // group_channels * parts, parts, EPS, PARTIALS)
    if HAS_OFFSET:
        mean -= tl.load(offset_ptr + row % channels).to(tl.float32)
    if HAS_WEIGHT:
        scale = scale * tl.load(weight_ptr + row % channels).to(tl.float32)
    y = (x - mean) * scale
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + row % channels).to(tl.float32)
    tl.store(out_ptr + places, silu(y).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_silu_pixels_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    offset_ptr,
    moments_ptr,
    out_ptr,
    length,
    channels,
    groups,
    parts,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    blocks = tl.cdiv(channels, COLUMNS)
    block = tl.program_id(0) % blocks
    # Inductor passes dynamic sizes in 64 bits, which cost a division; these fit 32.
    parts = tl.cast(parts, tl.int32)
    # Start from the end, which the statistics kernel read last: it may still be in the cache.
    part = parts - 1 - tl.program_id(0) // blocks % parts
    image = (tl.program_id(0) // blocks // parts).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    known = columns < channels
    of_group = moments_ptr + 2 * (image * groups + columns // (channels // groups))
    mean = tl.load(of_group, mask=known, other=0.0)
    scale = tl.load(of_group + 1, mask=known, other=0.0)
    if HAS_OFFSET:
        mean -= tl.load(offset_ptr + columns, mask=known, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        scale = scale * tl.load(weight_ptr + columns, mask=known, other=0.0).to(tl.float32)
    shift = tl.zeros([COLUMNS], dtype=tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias_ptr + columns, mask=known, other=0.0).to(tl.float32)
    places = tl.arange(0, ROWS)[:, None] * channels + columns[None, :]
    stride = ROWS * channels
    start = part.to(tl.int64) * STEPS * stride
    for step in range(STEPS):
        at = image * length + start + step * stride
        inside = (places < length - start - step * stride) & known[None, :]
        x = tl.load(x_ptr + at + places, mask=inside, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + shift[None, :]
        tl.store(out_ptr + at + places, silu(y).to(out_ptr.dtype.element_ty), mask=inside)
