"""`block_sparse_attention` on a GPU: one program per block of queries, with an online softmax.

Generated code calls the op as an operator: the host creates the copy engine's descriptors from addresses, and Triton
kernels inside a graph cannot take such descriptors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tritium.ops.op import Arguments
from tritium.ops.triton_launch import decline_tensors, launch, with_dense_rows

WIDTHS = (64, 128)
BLOCKS = (16, 32, 64, 128)
# CUDA's limit for the second dim of a grid.
MOST_HEADS = 65_535

# The options of a sweep that are Triton's.
TRITON_OPTIONS = ("num_warps", "num_stages")


def launch_options(dtype: torch.dtype, block: int, readable: bool) -> dict[str, Any]:
    """Return the tile sizes and warps for a block, which `benchmarks/sparse_attention.py` varies.

    TILE is the number of keys per step, PART the number in blocks that are partly masked. TABLES reads keys and values by
    the copy engine, if they are `readable` by it. On an H200 with 32,760 tokens, 40 heads of 128 and blocks of 128, half
    of them seen: 21.6 ms (509 TFLOP/s) by the copy engine with 128 keys per step, 27.7 ms with 64, and 24.5 ms with 64 by
    addresses, where 128 keys spill registers. Float32 products do not use tf32, and 16 keys per step spill least. Adding
    a tile's values in the next step, to overlap with its exponentials, gave wrong sums on an H200.
    """
    if dtype == torch.float32:
        cut = {"TILE": min(block, 16), "PART": min(block, 16), "PRECISION": "ieee", "TABLES": False}
        return {**cut, "num_warps": 8 if block >= 64 else 4, "num_stages": 2}
    tile = block if readable else min(block, 64)
    cut = {"TILE": tile, "PART": min(block, 32), "PRECISION": "tf32", "TABLES": readable}
    return {**cut, "num_warps": 8 if block >= 128 else 4, "num_stages": 3}


def run_triton(given: Arguments, chosen: Mapping[str, Any] | None = None) -> torch.Tensor:
    """Launch the kernel with the options `chosen`, or with those of `launch_options` if it is None."""
    import triton

    from tritium.ops.kernels.block_sparse_attention import block_sparse_attention_kernel

    q, k, v = map(with_dense_rows, (given.q, given.k, given.v))
    out = results(given)
    if out.numel() == 0:
        return out
    heads, blocks = q.shape[2], given.q_edges.shape[0] - 1
    interpreted = not isinstance(block_sparse_attention_kernel, triton.JITFunction)
    places = (places_of(k), places_of(v))
    if chosen is None:
        readable = (interpreted or has_copy_engine(q.device)) and None not in places
        chosen = launch_options(q.dtype, given.block, readable)
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
        *(table(tensor, found, chosen["TILE"]) for tensor, found in zip((k, v), places, strict=True)),
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
    return decline_tensors(q, given.k, v)


# Rows per sample, rows per head and columns per head of a tensor that is read as a 2-D table.
Places = tuple[int, int, int]


def places_of(tensor: torch.Tensor) -> Places | None:
    """Return rows per sample, rows per head and columns per head of [B, S, N, D] as a 2-D table, or None.

    A row is a token. The heads of a token are adjacent columns, or, if heads come first in memory, start some rows apart.
    None if the engine cannot read the tensor: it needs a non-empty table with a constant row stride, and units of 16 bytes.
    """
    heads, width = tensor.shape[2:]
    by_batch, by_head = (0 if tensor.shape[dim] == 1 else tensor.stride(dim) for dim in (0, 2))
    by_token = _row_stride(tensor)
    units = [place * tensor.element_size() % 16 for place in (by_batch, by_token, by_head)]
    if tensor.numel() == 0 or any(units) or tensor.data_ptr() % 16 or by_token < width or by_batch % by_token:
        return None
    rows_head, columns_head = (by_head // by_token, 0) if by_head % by_token == 0 else (0, by_head)
    places = by_batch // by_token, rows_head, columns_head
    beyond = columns_head * (heads - 1) + width > by_token or _rows(tensor, places) >= 2**31
    return None if beyond else places


def _row_stride(tensor: torch.Tensor) -> int:
    # The stride of a dim of size 1 is arbitrary.
    return tensor.shape[3] if tensor.shape[1] == 1 else tensor.stride(1)


def _rows(tensor: torch.Tensor, places: Places) -> int:
    return (tensor.shape[0] - 1) * places[0] + (tensor.shape[2] - 1) * places[1] + tensor.shape[1]


def table(tensor: torch.Tensor, places: Places | None, tile: int) -> Any:
    """Return a descriptor for tiles of `tile` tokens of one head; None if `places` is None."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if places is None:
        return None
    heads, width = tensor.shape[2:]
    columns = places[2] * (heads - 1) + width
    return TensorDescriptor(tensor, [_rows(tensor, places), columns], [_row_stride(tensor), 1], [tile, width])


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether a device is Hopper or a large Blackwell.

    Smaller GPUs with a copy engine lack the shared memory for the tiles of `launch_options`.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
