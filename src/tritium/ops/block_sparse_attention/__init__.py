"""Attention of each block of queries to some blocks of keys, in float32 with one rounding per product.

q is [B, S, N, D], k and v are [B, S', N', D] with N' dividing N, of any strides. A block is at most `block` consecutive
tokens: block i of the queries is tokens q_edges[i] to q_edges[i + 1], and the same for the keys. For each sample, head
and block of queries, `indices` lists the blocks of keys that are seen: first counts[..., 0] whole blocks, whose keys are
all seen by all of the queries, then the others; counts[..., 1] is the total. With `causal`, query i sees only keys 0 to i.
The result of a query that sees no key is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium import compat, fidelity
from tritium.compat import attention as compat_attention
from tritium.ops import attention
from tritium.ops.block_sparse_attention.eight_bits import decline_int8, run_int8
from tritium.ops.block_sparse_attention.flex import decline_flex, dense, run_flex
from tritium.ops.block_sparse_attention.reference import block_lists, draw_samples, reference
from tritium.ops.block_sparse_attention.triton import decline_triton, results, run_triton
from tritium.ops.op import REFERENCE, Arguments, FirstUse, Op, Provider, Shape, Trial

__all__ = ["OP", "block_lists", "reference"]


def shape(given: Arguments) -> Shape:
    return {"block": given.block, **attention.TRIAL.shape(dense(given))}


def alike(given: Arguments) -> Callable[[], Mapping[str, Any]] | None:
    """Return the arguments of the call: the number of listed blocks decides which provider is faster.

    None on a CPU, in graphs, and if there is nothing to compare.
    """
    if not given.q.is_cuda or compat.traced.is_traced(given.q) or decline_triton(given) is not None:
        return None
    return lambda: vars(given)


def check(given: Arguments) -> Callable[[torch.Tensor], str | None]:
    """Compare results with the Triton kernel's, which tests compare with the reference: that takes minutes for video."""
    exact = run_triton(given).double()
    allowed = 32 * torch.finfo(given.q.dtype).eps

    def too_far(out: torch.Tensor) -> str | None:
        error = fidelity.error(out, exact)
        return None if error <= allowed else f"it differs from the kernel by {error:.2e}, allowed {allowed:.2e}"

    return too_far


def rule(given: Arguments) -> str:
    if decline_triton(given) is None:
        return "triton"
    return "flex" if given.q.is_cuda and not compat.dynamo.is_compiling() else REFERENCE


PROVIDERS = (
    Provider("triton", "block_sparse_attention", run_triton, decline_triton),
    Provider("flex", "block_sparse_attention", run_flex, decline_flex),
    Provider("int8", "block_sparse_attention", run_int8, decline_int8, lossy=True),
)
TRIAL = Trial(shape, first_use=FirstUse(alike=alike, check=check, default=rule, versions=compat_attention.versions))
OP = Op("block_sparse_attention", reference, draw_samples, PROVIDERS, results=results, trial=TRIAL)
