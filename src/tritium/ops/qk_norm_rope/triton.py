"""`qk_norm_rope` on a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tritium.ops import rope as rotation
from tritium.ops.launch import cannot_launch, start
from tritium.ops.qk_norm_rope.arguments import angles, decline_form, real, table_kind
from tritium.ops.qk_norm_rope.reference import NONE, fake

T = TypeVar("T")

# A head this wide is 32 numbers a thread of the one warp that takes it.
WIDEST_HEAD = 1024
# Numbers of a token, all of which one program holds in registers.
WIDEST_TOKEN = 32_768

WARPS = (1, 2, 4, 8, 16)


@functools.cache
def _kernel() -> Any:  # noqa: C901, PLR0915 - what a kernel branches on are compile-time constants
    import triton
    import triton.language as tl

    # Triton takes annotations for types of its own: only compile-time constants may have one.
    @triton.jit  # type: ignore[untyped-decorator]
    def chosen(is_key, is_second, q_first, q_second, k_first, k_second, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
        one = tl.where(is_key, k_first, q_first)
        if PARTS == 2:
            one = tl.where(is_second, tl.where(is_key, k_second, q_second), one)
        return one

    @triton.jit  # type: ignore[untyped-decorator]
    def read(rows, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rows as they lie in memory: two halves, or the whole twice."""
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

    @triton.jit  # type: ignore[untyped-decorator]
    def paired(rows, HEADS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):  # type: ignore[no-untyped-def]
        """The first and the second numbers of the pairs of what was read, [HEADS, BLOCK / 2] each."""
        front, back = rows
        a = front.to(tl.float32)
        b = back.to(tl.float32)
        if not HALVES:
            # A thread holds both numbers of its pairs: nothing moves.
            a, b = tl.split(tl.reshape(a, [HEADS, BLOCK // 2, 2]))
        return a, b

    @triton.jit  # type: ignore[untyped-decorator]
    def write(  # type: ignore[no-untyped-def]
        rows, a, b, inside, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr
    ):
        if HALVES:
            columns = tl.arange(0, BLOCK // 2)[None, :]
            mask = inside & (columns < WIDTH // 2)
            tl.store(rows + columns, a, mask=mask)
            tl.store(rows + WIDTH // 2 + columns, b, mask=mask)
        else:
            columns = tl.arange(0, BLOCK)[None, :]
            both = tl.reshape(tl.join(a, b), [HEADS, BLOCK])
            tl.store(rows + columns, both, mask=inside & (columns < WIDTH))

    # Triton's interpreter finds functions among the names of the module alone.
    globals().update(chosen=chosen, read=read, paired=paired, write=write)

    @triton.jit  # type: ignore[untyped-decorator]
    def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
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
        eps,
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
        TOGETHER: tl.constexpr,
        X_UNIT: tl.constexpr,
        TABLE_UNIT: tl.constexpr,
    ):
        # q and k of a token are neighbours: the second to ask for the token's tables finds them in the L2 cache.
        program = tl.program_id(0)
        is_key = program % 2 == 1
        row = program // 2
        # 64 bits: tokens times heads times width passes 2^31 for video.
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
            loaded += (read(x_row + head * x_head * X_UNIT, head < heads, WIDTH, BLOCK, HALVES),)  # type: ignore[assignment]
        if TOGETHER:
            # To save registers ptxas puts later loads behind arithmetic with earlier ones; none passes a barrier.
            tl.debug_barrier()

        # Weights and tables are read as [HEADS, .], as x is: they come in the layout of x, without a trip through
        # shared memory, and stay in registers for all heads of the token.
        same = lane * 0
        everywhere = same == 0
        if TABLE != "none":
            table_ptr = chosen(False, is_second, first_table, second_table, first_table, second_table, TABLES)
            sine_ptr = chosen(False, is_second, first_sine, second_sine, first_sine, second_sine, TABLES)
            batch = chosen(False, is_second, first_table_batch, second_table_batch, 0, 0, TABLES)
            step = chosen(False, is_second, first_table_token, second_table_token, 0, 0, TABLES)
            angles = same + (sample * batch + (token if TABLES == PARTS else place) * step) * TABLE_UNIT
            turns = everywhere
            if FIRST_TURNS != SECOND_TURNS:
                turns = everywhere & (is_second == SECOND_TURNS)
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
                    # All heads have the same weight: it becomes part of the rotation.
                    a_cos, a_sin = a_cos * a_weight, a_sin * b_weight
                    b_cos, b_sin = b_cos * b_weight, b_sin * a_weight

        if NORM == "row":
            squares = tl.zeros([HEADS, BLOCK // 2], dtype=tl.float32)
            for index in tl.static_range(ROUNDS):
                a, b = paired(loaded[index], HEADS, BLOCK, HALVES)
                squares += a * a + b * b
            scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (heads * WIDTH) + eps)
        done = ()
        for index in tl.static_range(ROUNDS):
            a, b = paired(loaded[index], HEADS, BLOCK, HALVES)
            if NORM == "head":
                scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / WIDTH + eps)[:, None]
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
            done += ((a.to(q_out.dtype.element_ty), b.to(q_out.dtype.element_ty)),)  # type: ignore[assignment]

        # Last: no load can pass a store.
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

    return qk_norm_rope_kernel


def launch_options(heads: int, width: int, itemsize: int, *, halves: bool) -> dict[str, int]:
    """Heads that a program takes in a round, its rounds and its warps.

    In a round a thread loads 16 bytes: with more it would hold two heads, and the token's table twice. As many warps as
    leave a thread four loads, all under way together and all rotated by the table it read once, with at most an eighth
    of the threads idle. More warps where a thread would have to hold more than sixteen loads.
    """
    lanes = _power_of_2(width) // 2 if halves else _power_of_2(width)
    heads_a_warp = max(1, 32 * 16 // itemsize // lanes)
    loads = 2 if halves else 1

    def rounds(warps: int) -> int:
        return -(-heads // (heads_a_warp * warps))

    def idle(warps: int) -> float:
        return 1 - heads / (rounds(warps) * heads_a_warp * warps)

    busy = [warps for warps in WARPS if loads * rounds(warps) >= 4 and idle(warps) <= 1 / 8]
    enough = [warps for warps in WARPS if loads * rounds(warps) <= 16]
    warps = max(busy[-1] if busy else WARPS[0], enough[0] if enough else WARPS[-1])
    return {"HEADS": heads_a_warp * warps, "ROUNDS": rounds(warps), "TOGETHER": True, "num_warps": warps}


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def run_triton(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = fake(q, k, q_weights, k_weights, tables, sines, eps, norm, rope, heads_first)
    batch, first_tokens, heads, width = q[0].shape
    tokens = sum(part.shape[1] for part in q)
    if batch * tokens == 0:
        return q_out, k_out
    rows = [_rows(part) for part in (q[0], q[-1], k[0], k[-1])]
    weights = [rows[0] if w is None else w.contiguous() for w in (*_ends(q_weights), *_ends(k_weights))]
    rotations = [None if rope == NONE else _rotation(*given) for given in zip(tables, sines, strict=True)]
    turned = [(rows[0], rows[0]) if given is None else given for given in _ends(rotations)]
    x_unit, x_strides = _in_units([_steps(row)[:3] for row in rows])
    table_unit, table_strides = _in_units([_steps(cosines)[:2] for cosines, _ in turned])
    start(
        _kernel(),
        (2 * batch * tokens,),
        *rows,
        *weights,
        *(cosines for cosines, _ in turned),
        *(sine for _, sine in turned),
        q_out,
        k_out,
        float(eps),
        tokens,
        first_tokens,
        *x_strides,
        *table_strides,
        Q_HEADS=heads,
        K_HEADS=k[0].shape[2],
        WIDTH=width,
        PARTS=len(q),
        TABLES=len(tables),
        NORM=norm,
        WEIGHTED=q_weights[0] is not None,
        TABLE=table_kind(tables, rope, width),
        FIRST_TURNS=rotations[0] is not None,
        SECOND_TURNS=rotations[-1] is not None,
        HALVES=rope == rotation.HALF,
        HEADS_FIRST=heads_first,
        BLOCK=_power_of_2(width),
        X_UNIT=x_unit,
        TABLE_UNIT=table_unit,
        **launch_options(max(heads, k[0].shape[2]), width, q[0].element_size(), halves=rope == rotation.HALF),
    )
    return q_out, k_out


def _ends(given: Sequence[T | None]) -> tuple[T | None, T | None]:
    """The first and the last, each in place of the other if that is missing."""
    first, last = given[0], given[-1]
    return (last if first is None else first), (first if last is None else last)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _steps(x: torch.Tensor) -> list[int]:
    """Strides; of a dim of size 1, whose stride means nothing and may be odd, 0."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _in_units(strides: list[list[int]]) -> tuple[int, list[int]]:
    """Strides in units of the largest power of 2, up to 16, that divides all: the kernel then knows what they divide by."""
    flat = [stride for steps in strides for stride in steps]
    unit = math.gcd(16, *flat)
    return unit, [stride // unit for stride in flat]


def _rotation(table: torch.Tensor | None, sine: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines with the same strides; complex numbers as real pairs, side by side, twice."""
    if table is None:
        return None
    cosines = _rows(real(table).flatten(2))
    sines = cosines if sine is None else _rows(sine)
    if _steps(cosines) != _steps(sines):
        return cosines.contiguous(), sines.contiguous()
    return cosines, sines


def decline_triton(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> str | None:
    del eps, norm, heads_first
    weights, turning = [*q_weights, *k_weights], angles(tables, sines, rope)
    reason = decline_form(q, k, weights, turning)
    if reason is not None:
        return reason
    width = q[0].shape[-1]
    if width > WIDEST_HEAD:
        return f"the kernel takes heads of a width up to {WIDEST_HEAD}"
    if max(q[0].shape[2], k[0].shape[2]) * width > WIDEST_TOKEN:
        return f"the kernel takes tokens of up to {WIDEST_TOKEN:,} numbers"
    if len({weight is None for weight in weights}) > 1:
        return "some parts have a norm weight and some have none"
    return cannot_launch(*q, *k, *weights, *turning)
