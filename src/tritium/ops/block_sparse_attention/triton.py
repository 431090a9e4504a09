"""`block_sparse_attention` on a GPU: one program a block of queries, with a softmax that is corrected as it goes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tritium.ops import rows
from tritium.ops.block_sparse_attention import tables
from tritium.ops.block_sparse_attention.reference import fake
from tritium.ops.launch import cannot_launch, start

WIDTHS = (64, 128)
BLOCKS = (16, 32, 64, 128)
# What CUDA allows in the second dim of a grid.
MOST_HEADS = 65_535


@functools.cache
def _weigh() -> Any:
    import triton.language as tl

    @rows.jit
    def weigh(  # type: ignore[no-untyped-def]
        score, seen, scale, largest, total, ALL: tl.constexpr
    ):
        """Take keys [WIDTH, TILE] into a softmax that is under way: their weights, and by what earlier ones shrink."""
        if not ALL:
            score = tl.where(seen, score, float("-inf"))
        # The scale is above 0: the largest product has the largest score, and the rest is one multiply-add an element.
        now = tl.maximum(largest, tl.max(score, 1) * scale)
        safe = now
        if not ALL:
            # A query that has seen nothing so far: infinity less infinity is no number.
            safe = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(score * scale - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weight, 1)
        return now, total, shrink, weight

    return weigh


@functools.cache
def _add_values() -> Any:
    import triton.language as tl

    @rows.jit
    def add_values(weight, v, shrink, out, PRECISION: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
        weight = weight.to(v.dtype)
        if WIDEN:
            weight = weight.to(tl.float32)
            v = v.to(tl.float32)
        return tl.dot(weight, v, out * shrink[:, None], input_precision=PRECISION)

    return add_values


@functools.cache
def _kernel() -> Any:  # noqa: PLR0915 - what a kernel branches on are compile-time constants
    import triton.language as tl

    weigh, add_values = _weigh(), _add_values()

    @rows.jit
    def block_sparse_attention_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
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

        # 64 bits for where a block lies: tokens times heads times width passes 2^31 for video. 32 within it.
        place = tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, WIDTH)
        first_query = tl.load(q_edges_ptr + row)
        inside = place < tl.load(q_edges_ptr + row + 1) - first_query
        q_start = (
            q_ptr + sample.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + first_query.to(tl.int64) * q_token
        )
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
        # Where the next tile begins is read one step ahead and its block's number two: no load here waits for another.
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

        # What is masked takes more registers than what is not: fewer keys at a time.
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
            out_ptr
            + sample.to(tl.int64) * out_batch
            + head.to(tl.int64) * out_head
            + first_query.to(tl.int64) * out_token
        )
        tl.store(out_start + place * out_token + column[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)

    return block_sparse_attention_kernel


def launch_options(dtype: torch.dtype, block: int, width: int, readable: bool) -> dict[str, Any]:
    """How a block is cut and by how many warps it is computed: what `benchmarks/sparse_attention.py` varies.

    TILE is how many keys are taken at a time, PART how many where some of them are masked. TABLES reads keys and values
    by the copy engine, which is possible where they are `readable` so. On an H200, 32,760 tokens of 40 heads of 128 in
    blocks of 128, half of them seen: 21.6 ms (509 TFLOP/s) by the copy engine with 128 keys at a time, 27.7 ms with 64,
    and 24.5 ms with 64 by addresses, where 128 spill. In float32 products are not shortened to tf32, and 16 keys at a
    time spill least. Adding the values of a tile in the next step, under that step's exponentials, gave wrong sums there.
    """
    if dtype == torch.float32:
        tile, warps = min(block, 16), 8 if block >= 64 else 4
        return _options(tile, tile, False, warps, 2) | {"PRECISION": "ieee"}
    del width
    if readable:
        return _options(block, min(block, 32), True, 8 if block >= 128 else 4, 3)
    return _options(min(block, 64), min(block, 32), False, 8 if block >= 128 else 4, 3)


def _options(tile: int, part: int, tables: bool, warps: int, stages: int) -> dict[str, Any]:
    cut = {"TILE": tile, "PART": part, "PRECISION": "tf32", "TABLES": tables}
    return {**cut, "num_warps": warps, "num_stages": stages}


def run_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    indices: torch.Tensor,
    q_edges: torch.Tensor,
    k_edges: torch.Tensor,
    block: int,
    scale: float,
    causal: bool,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """`options` are those of a sweep; otherwise `launch_options` says which."""
    import triton

    out = fake(q, k, v, counts, indices, q_edges, k_edges, block, scale, causal)
    if out.numel() == 0:
        return out
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    heads = q.shape[2]
    interpreted = not isinstance(_kernel(), triton.JITFunction)
    places = (tables.places_of(k), tables.places_of(v))
    if options is None:
        readable = (interpreted or tables.has_copy_engine(q.device)) and None not in places
        options = launch_options(q.dtype, block, q.shape[3], readable)
    if not options["TABLES"]:
        places = (None, None)
    given = {name: value for name, value in options.items() if name != "TABLES"}
    start(
        _kernel(),
        (q_edges.shape[0] - 1, q.shape[0] * heads),
        q,
        k,
        v,
        counts.contiguous(),
        indices.contiguous(),
        q_edges,
        k_edges,
        out,
        *(tables.table(tensor, found, options["TILE"]) for tensor, found in zip((k, v), places, strict=True)),
        # Exponentials of base 2 are what a GPU computes.
        float(scale) / math.log(2),
        heads,
        heads // k.shape[2],
        q_edges.shape[0] - 1,
        k_edges.shape[0] - 1,
        *(tensor.stride(dim) for tensor in (q, k, v, out) for dim in (0, 1, 2)),
        *(place for found in places for place in found or (0, 0, 0)),
        CAUSAL=causal,
        BLOCK=block,
        WIDTH=q.shape[3],
        # Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers.
        WIDEN=q.dtype == torch.bfloat16 and interpreted,
        **given,
    )
    return out


def decline_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    indices: torch.Tensor,
    q_edges: torch.Tensor,
    k_edges: torch.Tensor,
    block: int,
    scale: float,
    causal: bool,
) -> str | None:
    del causal
    if not scale > 0:
        return f"the kernel takes a scale above 0, got {scale}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] != q.shape[-1]:
        return f"the kernel takes heads {' or '.join(map(str, WIDTHS))} wide, got {q.shape[-1]} and {v.shape[-1]}"
    if block not in BLOCKS:
        return f"the kernel takes blocks of {', '.join(map(str, BLOCKS))} tokens, got {block}"
    if q.shape[0] * q.shape[2] > MOST_HEADS:
        return f"the kernel takes up to {MOST_HEADS:,} heads of all samples, got {q.shape[0] * q.shape[2]:,}"
    if any(lists.dtype != torch.int32 for lists in (counts, indices, q_edges, k_edges)):
        return "the kernel takes lists in int32"
    return cannot_launch(q, k, v)
