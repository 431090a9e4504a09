"""The kernel of `block_sparse_attention`."""

import triton
import triton.language as tl


@triton.jit
def weigh(score, seen, scale, largest, total, ALL: tl.constexpr):
    """Add the scores of a tile to an online softmax; return their weights and the factor for earlier sums."""
    if not ALL:
        score = tl.where(seen, score, float("-inf"))
    # The scale is above 0, so the largest product has the largest score, and each element takes one multiply-add.
    now = tl.maximum(largest, tl.max(score, 1) * scale)
    safe = now
    if not ALL:
        # For a query that has seen no key yet, inf - inf would be NaN.
        safe = tl.where(now == float("-inf"), 0.0, now)
    weight = tl.exp2(score * scale - safe[:, None])
    shrink = tl.exp2(largest - safe)
    total = total * shrink + tl.sum(weight, 1)
    return now, total, shrink, weight


@triton.jit
def add_values(weight, v, shrink, out, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    weight = weight.to(v.dtype)
    if WIDEN:
        weight = weight.to(tl.float32)
        v = v.to(tl.float32)
    return tl.dot(weight, v, out * shrink[:, None], input_precision=PRECISION)


@triton.jit
def block_sparse_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    counts_ptr,
    indices_ptr,
    q_edges_ptr,
    k_edges_ptr,
    out_ptr,
    k_table,
    v_table,
    scale,
    heads,
    group,
    q_blocks,
    k_blocks,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    out_batch,
    out_token,
    out_head,
    k_row_batch,
    k_row_head,
    k_column_head,
    v_row_batch,
    v_row_head,
    v_column_head,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0)
    sample = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    list_number = tl.program_id(1).to(tl.int64) * q_blocks + row
    whole = tl.load(counts_ptr + 2 * list_number)
    listed = tl.load(counts_ptr + 2 * list_number + 1)
    indices = indices_ptr + list_number * k_blocks

    # 64 bits for the start of a block: tokens times heads times width exceeds 2^31 for video. 32 bits within a block.
    place = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, WIDTH)
    first_query = tl.load(q_edges_ptr + row)
    inside = place < tl.load(q_edges_ptr + row + 1) - first_query
    q_start = q_ptr + sample.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
    q = tl.load(q_start + place * q_token + column[None, :], mask=inside, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    kv_head = head // group
    k_start = k_ptr + sample.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    v_start = v_ptr + sample.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
    if k_table is not None:
        k_row, k_column = sample * k_row_batch + kv_head * k_row_head, kv_head * k_column_head
        v_row, v_column = sample * v_row_batch + kv_head * v_row_head, kv_head * v_column_head

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    tiles: tl.constexpr = BLOCK // TILE
    # Prefetch the start of the next tile by one step and its block's index by two: no load here waits for another.
    steps = whole * tiles
    following = tl.load(k_edges_ptr + tl.load(indices, mask=steps > 0, other=0))
    index = tl.load(indices + 1 // tiles, mask=steps > 1, other=0)
    for step in range(steps):
        first = following
        following = tl.load(k_edges_ptr + index) + (step + 1) % tiles * TILE
        index = tl.load(indices + (step + 2) // tiles, mask=step + 2 < steps, other=0)
        if k_table is not None:
            k = k_table.load([k_row + first, k_column]).T
            v = v_table.load([v_row + first, v_column])
        else:
            token = tl.arange(0, TILE)
            k = tl.load(k_start + first.to(tl.int64) * k_token + token[None, :] * k_token + column[:, None])
            v = tl.load(v_start + first.to(tl.int64) * v_token + token[:, None] * v_token + column[None, :])
        if WIDEN:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=PRECISION)
        largest, total, shrink, weight = weigh(score, None, scale, largest, total, True)
        out = add_values(weight, v, shrink, out, PRECISION, WIDEN)

    # Masked tiles take more registers than whole ones, so they have fewer keys.
    part_tiles: tl.constexpr = BLOCK // PART
    for step in tl.range(whole * part_tiles, listed * part_tiles, num_stages=1):
        edge = k_edges_ptr + tl.load(indices + step // part_tiles)
        first = tl.load(edge) + step % part_tiles * PART
        left = tl.load(edge + 1) - first
        part_token = tl.arange(0, PART)
        k_part = k_start + first.to(tl.int64) * k_token + part_token[None, :] * k_token + column[:, None]
        v_part = v_start + first.to(tl.int64) * v_token + part_token[:, None] * v_token + column[None, :]
        seen = part_token[None, :] < left
        k = tl.load(k_part, mask=seen, other=0.0)
        v = tl.load(v_part, mask=part_token[:, None] < left, other=0.0)
        if CAUSAL:
            seen = seen & (first + part_token[None, :] <= first_query + place)
        if WIDEN:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=PRECISION)
        largest, total, part_shrink, part = weigh(score, seen, scale, largest, total, False)
        out = add_values(part, v, part_shrink, out, PRECISION, WIDEN)

    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    out_start = (
        out_ptr + sample.to(tl.int64) * out_batch + head.to(tl.int64) * out_head + first_query.to(tl.int64) * out_token
    )
    tl.store(out_start + place * out_token + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
