"""Attention of each block of queries to some blocks of keys, in float32 with one rounding per product.

q is [B, S, N, D], k and v are [B, S', N', D] with N' dividing N, of any strides. A block is at most `block` consecutive
tokens: block i of the queries is tokens q_edges[i] to q_edges[i + 1], and the same for the keys. For each sample, head
and block of queries, `indices` lists the blocks of keys that are seen: first counts[..., 0] whole blocks, whose keys are
all seen by all of the queries, then the others; counts[..., 1] is the total. With `causal`, query i sees only keys 0 to i.
The result of a query that sees no key is zero.
"""

from __future__ import annotations

from tritium.ops.block_sparse_attention.flex import decline_flex, run_flex
from tritium.ops.block_sparse_attention.lists import block_lists
from tritium.ops.block_sparse_attention.reference import reference, samples
from tritium.ops.block_sparse_attention.trial import TRIAL
from tritium.ops.block_sparse_attention.triton import decline_triton, results, run_triton
from tritium.ops.op import Op, Provider

__all__ = ["OP", "block_lists", "decline_triton", "reference", "run_triton", "samples"]

OP = Op(
    name="block_sparse_attention",
    reference=reference,
    samples=samples,
    results=results,
    providers=(
        Provider("triton", "block_sparse_attention", run_triton, decline_triton),
        Provider("flex", "block_sparse_attention", run_flex, decline_flex),
    ),
    trial=TRIAL,
)
