"""`block_sparse_attention` on a GPU: one program per block of queries, with an online softmax.

Generated code calls the op as an operator: the host creates the copy engine's descriptors from addresses, and Triton
kernels inside a graph cannot take such descriptors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tritium.ops.block_sparse_attention import tables
from tritium.ops.op import Arguments
from tritium.ops.triton_launch import launch, obstacle

WIDTHS = (64, 128)
BLOCKS = (16, 32, 64, 128)
# CUDA's limit for the second dim of a grid.
MOST_HEADS = 65_535

# The options of a sweep that are Triton's.
TRITON_OPTIONS = ("num_warps", "num_stages")


def launch_options(dtype: torch.dtype, block: int, width: int, readable: bool) -> dict[str, Any]:
    """Return the tile sizes and warps for a block, which `benchmarks/sparse_attention.py` varies.

    TILE is the number of keys per step, PART the number in blocks that are partly masked. TABLES reads keys and values by
    the copy engine, if they are `readable` by it. On an H200 with 32,760 tokens, 40 heads of 128 and blocks of 128, half
    of them seen: 21.6 ms (509 TFLOP/s) by the copy engine with 128 keys per step, 27.7 ms with 64, and 24.5 ms with 64 by
    addresses, where 128 keys spill registers. Float32 products do not use tf32, and 16 keys per step spill least. Adding
    a tile's values in the next step, to overlap with its exponentials, gave wrong sums on an H200.
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


def run_triton(given: Arguments, chosen: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Launch the kernel with the options `chosen`, or with those of `launch_options` if it is None."""
    import triton

    from tritium.ops.kernels.block_sparse_attention import block_sparse_attention_kernel

    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (given.q, given.k, given.v))
    out = results(given)
    if out.numel() == 0:
        return out
    heads, blocks = q.shape[2], given.q_edges.shape[0] - 1
    interpreted = not isinstance(block_sparse_attention_kernel, triton.JITFunction)
    places = (tables.places_of(k), tables.places_of(v))
    if chosen is None:
        readable = (interpreted or tables.has_copy_engine(q.device)) and None not in places
        chosen = launch_options(q.dtype, given.block, q.shape[3], readable)
    if not chosen["TABLES"]:
        places = (None, None)
    cut = {name: value for name, value in chosen.items() if name not in ("TABLES", *TRITON_OPTIONS)}
    launch(
        block_sparse_attention_kernel,
        (blocks, q.shape[0] * heads),
        q,
        k,
        v,
        given.counts.contiguous(),
        given.indices.contiguous(),
        given.q_edges,
        given.k_edges,
        out,
        *(tables.table(tensor, found, chosen["TILE"]) for tensor, found in zip((k, v), places, strict=True)),
        # GPUs compute exponentials in base 2.
        float(given.scale) / math.log(2),
        heads,
        heads // k.shape[2],
        blocks,
        given.k_edges.shape[0] - 1,
        *(tensor.stride(dim) for tensor in (q, k, v, out) for dim in (0, 1, 2)),
        *(place for found in places for place in found or (0, 0, 0)),
        CAUSAL=given.causal,
        BLOCK=given.block,
        WIDTH=q.shape[3],
        # Triton's interpreter multiplies the bits of bfloat16 as integers.
        WIDEN=q.dtype == torch.bfloat16 and interpreted,
        options={name: chosen[name] for name in TRITON_OPTIONS if name in chosen},
        **cut,
    )
    return out


def results(given: Arguments) -> torch.Tensor:
    q: torch.Tensor = given.q
    return q.new_empty((*q.shape[:3], given.v.shape[3]))


def decline_triton(given: Arguments) -> str | None:
    q, v, lists = given.q, given.v, (given.counts, given.indices, given.q_edges, given.k_edges)
    if not given.scale > 0:
        return f"the kernel takes a scale above 0, got {given.scale}"
    if q.shape[-1] not in WIDTHS or v.shape[-1] != q.shape[-1]:
        return f"the kernel takes heads {' or '.join(map(str, WIDTHS))} wide, got {q.shape[-1]} and {v.shape[-1]}"
    if given.block not in BLOCKS:
        return f"the kernel takes blocks of {', '.join(map(str, BLOCKS))} tokens, got {given.block}"
    if q.shape[0] * q.shape[2] > MOST_HEADS:
        return f"the kernel takes up to {MOST_HEADS:,} heads of all samples, got {q.shape[0] * q.shape[2]:,}"
    if any(numbers.dtype != torch.int32 for numbers in lists):
        return "the kernel takes lists in int32"
    return obstacle(q, given.k, v)
