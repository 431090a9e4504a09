"""The kernel of `qk_norm_rope`."""

import triton
import triton.language as tl


@triton.jit
def chosen(is_key, is_second, q_first, q_second, k_first, k_second, PARTS: tl.constexpr):
    one = tl.where(is_key, k_first, q_first)
    if PARTS == 2:
        one = tl.where(is_second, tl.where(is_key, k_second, q_second), one)
    return one


@triton.jit
def read(rows, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    """Load rows as two halves, or return the whole rows twice."""
    if HALVES:
        columns = tl.arange(0, BLOCK // 2)[None, :]
        mask = inside & (columns < WIDTH // 2)
        front = tl.load(rows + columns, mask=mask, other=0.0)
        back = tl.load(rows + WIDTH // 2 + columns, mask=mask, other=0.0)
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        front = tl.load(rows + columns, mask=inside & (columns < WIDTH), other=0.0)
        back = front
    return front, back


@triton.jit
def paired(rows, HEADS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    """Return the first and the second elements of the pairs in loaded rows, [HEADS, BLOCK / 2] each."""
    front, back = rows
    a = front.to(tl.float32)
    b = back.to(tl.float32)
    if not HALVES:
        # A thread holds both elements of its pairs, so the split moves no data between threads.
        a, b = tl.split(tl.reshape(a, [HEADS, BLOCK // 2, 2]))
    return a, b


@triton.jit
def write(rows, a, b, inside, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        columns = tl.arange(0, BLOCK // 2)[None, :]
        mask = inside & (columns < WIDTH // 2)
        tl.store(rows + columns, a, mask=mask)
        tl.store(rows + WIDTH // 2 + columns, b, mask=mask)
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        both = tl.reshape(tl.join(a, b), [HEADS, BLOCK])
        tl.store(rows + columns, both, mask=inside & (columns < WIDTH))


@triton.jit
def qk_norm_rope_kernel(
    q_first,
    q_second,
    k_first,
    k_second,
    q_first_weight,
    q_second_weight,
    k_first_weight,
    k_second_weight,
    first_table,
    second_table,
    first_sine,
    second_sine,
    q_out,
    k_out,
    tokens,
    first_tokens,
    q_first_batch,
    q_first_token,
    q_first_head,
    q_second_batch,
    q_second_token,
    q_second_head,
    k_first_batch,
    k_first_token,
    k_first_head,
    k_second_batch,
    k_second_token,
    k_second_head,
    first_table_batch,
    first_table_token,
    second_table_batch,
    second_table_token,
    EPS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TABLES: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TABLE: tl.constexpr,
    FIRST_TURNS: tl.constexpr,
    SECOND_TURNS: tl.constexpr,
    HALVES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    ROUNDS: tl.constexpr,
    X_UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr,
):
    # Inductor passes dynamic sizes in 64 bits, which cost a division; these fit 32.
    tokens = tl.cast(tokens, tl.int32)
    # q and k of a token are adjacent programs: the second reads the token's tables from the L2 cache.
    program = tl.program_id(0)
    is_key = program % 2 == 1
    row = program // 2
    # 64 bits: tokens times heads times width exceeds 2^31 for video.
    sample = (row // tokens).to(tl.int64)
    place = (row % tokens).to(tl.int64)
    is_second = place >= first_tokens
    token = place
    if PARTS == 2:
        token = tl.where(is_second, place - first_tokens, place)
    x_batch = chosen(is_key, is_second, q_first_batch, q_second_batch, k_first_batch, k_second_batch, PARTS)
    x_token = chosen(is_key, is_second, q_first_token, q_second_token, k_first_token, k_second_token, PARTS)
    x_head = chosen(is_key, is_second, q_first_head, q_second_head, k_first_head, k_second_head, PARTS)
    x_ptr = chosen(is_key, is_second, q_first, q_second, k_first, k_second, PARTS)
    x_row = x_ptr + (sample * x_batch + token * x_token) * X_UNIT
    heads = Q_HEADS if Q_HEADS == K_HEADS else tl.where(is_key, K_HEADS, Q_HEADS)

    lane = tl.arange(0, HEADS)[:, None].to(tl.int64)
    loaded = ()
    for index in tl.static_range(ROUNDS):
        head = index * HEADS + lane
        loaded += (read(x_row + head * x_head * X_UNIT, head < heads, WIDTH, BLOCK, HALVES),)
    # To save registers ptxas would move later loads behind arithmetic on earlier ones; the barrier prevents that.
    tl.debug_barrier()

    # Read weights and tables as [HEADS, .], like x: they then have the layout of x, need no conversion through shared
    # memory, and stay in registers for all heads of the token.
    same = lane * 0
    everywhere = same == 0
    if TABLE != "none":
        table_ptr = chosen(False, is_second, first_table, second_table, first_table, second_table, TABLES)
        if TABLE != "complex":
            sine_ptr = chosen(False, is_second, first_sine, second_sine, first_sine, second_sine, TABLES)
        batch = chosen(False, is_second, first_table_batch, second_table_batch, 0, 0, TABLES)
        step = chosen(False, is_second, first_table_token, second_table_token, 0, 0, TABLES)
        angles = same + (sample * batch + (token if TABLES == PARTS else place) * step) * TABLE_UNIT
        turns = everywhere
        if FIRST_TURNS != SECOND_TURNS:
            # Integers: Triton's interpreter keeps the dtype of a comparison's operands, and a mask must be boolean.
            turns = (same + is_second.to(tl.int32)) == SECOND_TURNS
        if TABLE == "complex":
            a_cos, a_sin = paired(read(table_ptr + angles, turns, WIDTH, BLOCK, False), HEADS, BLOCK, False)
            b_cos, b_sin = a_cos, a_sin
        elif TABLE == "pair":
            pairs = tl.arange(0, BLOCK // 2)[None, :]
            known = turns & (pairs < WIDTH // 2)
            a_cos = tl.load(table_ptr + angles + pairs, mask=known, other=0.0).to(tl.float32)
            a_sin = tl.load(sine_ptr + angles + pairs, mask=known, other=0.0).to(tl.float32)
            b_cos, b_sin = a_cos, a_sin
        else:
            a_cos, b_cos = paired(read(table_ptr + angles, turns, WIDTH, BLOCK, HALVES), HEADS, BLOCK, HALVES)
            a_sin, b_sin = paired(read(sine_ptr + angles, turns, WIDTH, BLOCK, HALVES), HEADS, BLOCK, HALVES)
        if FIRST_TURNS != SECOND_TURNS:
            a_cos = tl.where(turns, a_cos, 1.0)
            b_cos = tl.where(turns, b_cos, 1.0)
    if WEIGHTED:
        weight = chosen(is_key, is_second, q_first_weight, q_second_weight, k_first_weight, k_second_weight, PARTS)
        if NORM != "row":
            a_weight, b_weight = paired(read(weight + same, everywhere, WIDTH, BLOCK, HALVES), HEADS, BLOCK, HALVES)
            if TABLE != "none":
                # All heads have the same weight: multiply it into the rotation.
                a_cos, a_sin = a_cos * a_weight, a_sin * b_weight
                b_cos, b_sin = b_cos * b_weight, b_sin * a_weight

    if NORM == "row":
        squares = tl.zeros([HEADS, BLOCK // 2], dtype=tl.float32)
        for index in tl.static_range(ROUNDS):
            a, b = paired(loaded[index], HEADS, BLOCK, HALVES)
            squares += a * a + b * b
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (heads * WIDTH) + EPS)
    done = ()
    for index in tl.static_range(ROUNDS):
        a, b = paired(loaded[index], HEADS, BLOCK, HALVES)
        if NORM == "head":
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / WIDTH + EPS)[:, None]
        if WEIGHTED and NORM == "row":
            head = index * HEADS + lane
            rows = read(weight + head * WIDTH, head < heads, WIDTH, BLOCK, HALVES)
            a_weight, b_weight = paired(rows, HEADS, BLOCK, HALVES)
        if WEIGHTED and (NORM == "row" or TABLE == "none"):
            a, b = a * a_weight, b * b_weight
        if TABLE != "none":
            a, b = a * a_cos - b * a_sin, b * b_cos + a * b_sin
        if NORM != "none":
            a, b = a * scale, b * scale
        done += ((a.to(q_out.dtype.element_ty), b.to(q_out.dtype.element_ty)),)

    # Store last: the compiler moves no load above a store.
    if HEADS_FIRST:
        out_row = tl.where(is_key, k_out, q_out) + (sample * heads * tokens + place) * WIDTH
        out_head = tokens * WIDTH
    else:
        out_row = tl.where(is_key, k_out, q_out) + (sample * tokens + place) * heads * WIDTH
        out_head = WIDTH
    for index in tl.static_range(ROUNDS):
        head = index * HEADS + lane
        a, b = done[index]
        write(out_row + head * out_head, a, b, head < heads, WIDTH, HEADS, BLOCK, HALVES)
