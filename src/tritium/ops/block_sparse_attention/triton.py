"""`block_sparse_attention` on a GPU: one program a block of queries, with a softmax that is corrected as it goes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tritium.ops import rows
from tritium.ops.block_sparse_attention.reference import fake
from tritium.ops.launch import cannot_launch, start

WIDTHS = (64, 128)
BLOCKS = (16, 32, 64, 128)


@functools.cache
def _seen_tile() -> Any:
    import triton.language as tl

    @rows.jit
    def seen_tile(  # type: ignore[no-untyped-def]
        q,
        k_start,
        v_start,
        k_token,
        v_token,
        first,
        last,
        query,
        scale,
        largest,
        total,
        out,
        ALL: tl.constexpr,
        CAUSAL: tl.constexpr,
        TILE: tl.constexpr,
        WIDTH: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDEN: tl.constexpr,
    ):
        """Take keys `first` to `last`, at most TILE of them, into a softmax that is under way."""
        token = first + tl.arange(0, TILE)
        column = tl.arange(0, WIDTH)
        # 64 bits: tokens times heads times width passes 2^31 for video.
        k_place = k_start + token[None, :].to(tl.int64) * k_token + column[:, None]
        v_place = v_start + token[:, None].to(tl.int64) * v_token + column[None, :]
        if ALL:
            k = tl.load(k_place)
            v = tl.load(v_place)
        else:
            k = tl.load(k_place, mask=token[None, :] < last, other=0.0)
            v = tl.load(v_place, mask=token[:, None] < last, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if not ALL:
            seen = token[None, :] < last
            if CAUSAL:
                seen = seen & (token[None, :] <= query[:, None])
            score = tl.where(seen, score, float("-inf"))
        now = tl.maximum(largest, tl.max(score, 1))
        safe = now
        if not ALL:
            # A query that has seen nothing so far: infinity less infinity is no number.
            safe = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(v.dtype)
        if WIDEN:
            weight = weight.to(tl.float32)
            v = v.to(tl.float32)
        out = tl.dot(weight, v, out * shrink[:, None], input_precision=PRECISION)
        return now, total, out

    return seen_tile


@functools.cache
def _kernel() -> Any:
    import triton.language as tl

    seen_tile = _seen_tile()

    @rows.jit
    def block_sparse_attention_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        counts_ptr,
        indices_ptr,
        q_edges_ptr,
        k_edges_ptr,
        out_ptr,
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
        CAUSAL: tl.constexpr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
        WIDTH: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDEN: tl.constexpr,
    ):
        row = tl.program_id(0)
        sample = (tl.program_id(1) // heads).to(tl.int64)
        head = (tl.program_id(1) % heads).to(tl.int64)
        list_number = tl.program_id(1).to(tl.int64) * q_blocks + row
        whole = tl.load(counts_ptr + 2 * list_number)
        listed = tl.load(counts_ptr + 2 * list_number + 1)
        indices = indices_ptr + list_number * k_blocks

        query = tl.load(q_edges_ptr + row) + tl.arange(0, BLOCK)
        inside = query[:, None] < tl.load(q_edges_ptr + row + 1)
        column = tl.arange(0, WIDTH)[None, :]
        far = query[:, None].to(tl.int64)
        q = tl.load(q_ptr + sample * q_batch + head * q_head + far * q_token + column, mask=inside, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        k_start = k_ptr + sample * k_batch + (head // group) * k_head
        v_start = v_ptr + sample * v_batch + (head // group) * v_head

        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        out = tl.zeros([BLOCK, WIDTH], tl.float32)
        tiles: tl.constexpr = BLOCK // TILE
        for step in range(whole * tiles):
            first = tl.load(k_edges_ptr + tl.load(indices + step // tiles)) + (step % tiles) * TILE
            largest, total, out = seen_tile(
                q, k_start, v_start, k_token, v_token, first, first + TILE, query, scale, largest, total, out,
                True, CAUSAL, TILE, WIDTH, PRECISION, WIDEN,
            )  # fmt: skip
        for step in range(whole * tiles, listed * tiles):
            place = k_edges_ptr + tl.load(indices + step // tiles)
            first = tl.load(place) + (step % tiles) * TILE
            largest, total, out = seen_tile(
                q, k_start, v_start, k_token, v_token, first, tl.load(place + 1), query, scale, largest, total, out,
                False, CAUSAL, TILE, WIDTH, PRECISION, WIDEN,
            )  # fmt: skip

        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        out_place = out_ptr + sample * out_batch + head * out_head + far * out_token + column
        tl.store(out_place, out.to(out_ptr.dtype.element_ty), mask=inside)

    return block_sparse_attention_kernel


def launch_options(dtype: torch.dtype, block: int, width: int) -> dict[str, Any]:
    """How a block is cut and by how many warps it is computed: what a sweep would vary.

    As sm_90 code, 64 keys at a time in three buffers take 178 registers and 128 KiB of shared memory for heads of 128, and
    226 registers of half as many warps and 64 KiB for heads of 64, of which two programs fit on a multiprocessor of an
    H200. 128 keys at a time spill. In float32 products are not shortened to tf32, and 16 keys at a time spill least.
    """
    if dtype == torch.float32:
        return {"TILE": min(block, 16), "PRECISION": "ieee", "num_warps": 8 if block >= 64 else 4, "num_stages": 2}
    warps = 8 if block >= 128 and width > 64 else 4
    return {"TILE": min(block, 64), "PRECISION": "tf32", "num_warps": warps, "num_stages": 3}


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
) -> torch.Tensor:
    import triton

    out = fake(q, k, v, counts, indices, q_edges, k_edges, block, scale, causal)
    if out.numel() == 0:
        return out
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    heads = q.shape[2]
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
        # Exponentials of base 2 are what a GPU computes.
        float(scale) / math.log(2),
        heads,
        heads // k.shape[2],
        q_edges.shape[0] - 1,
        k_edges.shape[0] - 1,
        *(tensor.stride(dim) for tensor in (q, k, v, out) for dim in (0, 1, 2)),
        CAUSAL=causal,
        BLOCK=block,
        WIDTH=q.shape[3],
        # Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers.
        WIDEN=q.dtype == torch.bfloat16 and not isinstance(_kernel(), triton.JITFunction),
        **launch_options(q.dtype, block, q.shape[3]),
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
    del scale, causal
    if q.shape[-1] not in WIDTHS or v.shape[-1] != q.shape[-1]:
        return f"the kernel takes heads {' or '.join(map(str, WIDTHS))} wide, got {q.shape[-1]} and {v.shape[-1]}"
    if block not in BLOCKS:
        return f"the kernel takes blocks of {', '.join(map(str, BLOCKS))} tokens, got {block}"
    if any(lists.dtype != torch.int32 for lists in (counts, indices, q_edges, k_edges)):
        return "the kernel takes lists in int32"
    return cannot_launch(q, k, v)
