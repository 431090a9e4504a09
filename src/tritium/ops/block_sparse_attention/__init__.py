"""Attention of each block of queries to some blocks of keys, computed in float32 with one rounding a product.

q is [B, S, N, D], k and v are [B, S', N', D] with N' dividing N, of any strides. Blocks are runs of tokens, `block` of them
or fewer: block i of the queries is tokens q_edges[i] to q_edges[i + 1], and the same for the keys. For each sample, head
and block of queries, `indices` lists the blocks of keys that are seen: counts[..., 0] that are whole and seen by all of
the queries, and after them others, counts[..., 1] in all. With `causal` a query sees keys up to its own number only.
A query that sees no key gives zeros.
"""

from __future__ import annotations

from tritium.ops.block_sparse_attention.lists import block_lists
from tritium.ops.block_sparse_attention.reference import reference, samples
from tritium.ops.block_sparse_attention.triton import decline_triton, results, run_triton
from tritium.ops.op import Op, Provider

__all__ = ["OP", "block_lists", "decline_triton", "reference", "run_triton", "samples"]

OP = Op(
    name="block_sparse_attention",
    reference=reference,
    samples=samples,
    results=results,
    providers=(Provider("triton", "block_sparse_attention", run_triton, decline_triton),),
)
