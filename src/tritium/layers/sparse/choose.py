"""Choose the provider of a block-sparse attention, and call it.

A graph of Dynamo contains `tritium::choose_sparse_attention`, which chooses when it is traced.
"""

from __future__ import annotations

from typing import Any

import torch

from tritium import compat, ops, tuning
from tritium.errors import ArgumentError, nearest
from tritium.layers.arguments import refuse_gradients_in_a_graph
from tritium.layers.attention.choose import note_choice
from tritium.ops import REFERENCE
from tritium.ops import block_sparse_attention as op
from tritium.ops.op import present

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define(
    "choose_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor counts, Tensor indices, Tensor q_edges, "
    "Tensor k_edges, int block, float scale, bool causal, str? by, str identity) -> Tensor"
)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: tuple[torch.Tensor, torch.Tensor],
    q_edges: torch.Tensor,
    k_edges: torch.Tensor,
    block: int,
    scale: float,
    causal: bool = False,
    by: str | None = None,
) -> torch.Tensor:
    """Compute attention of permuted streams [B, S, N, D] over lists of blocks; `by=None`: fastest."""
    refuse_gradients_in_a_graph("sparse attention", q, k, v)
    given = (q, k, v, *lists, q_edges, k_edges, block, scale, causal)
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.tritium.choose_sparse_attention.default(*given, by, _identity())  # type: ignore[no-any-return]
    if compat.dynamo.is_mapped(*lists):
        # Under vmap the reference cannot read the lists, and the operator has no backward.
        if torch.is_grad_enabled():
            raise ArgumentError("vmap over sparse attention computes no gradients: call it under torch.no_grad()")
    elif compat.dynamo.needs_gradients(q, k, v):
        if by not in (None, REFERENCE):
            raise ArgumentError(f"sparse attention by {by!r} computes no gradients; by {REFERENCE!r} it does")
        return _with_gradients(*given)  # type: ignore[no-any-return]
    return _attend(*given, by, "")


# Untraced: it loops over lists of blocks by their values, which a graph cannot do.
_with_gradients = compat.dynamo.untraced(op.reference)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _identity() -> str:
    return tuning.identity(op.OP)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unknown(by: str) -> str | None:
    known = [*ops.providers(op.OP), REFERENCE]
    return None if by in known else f"no provider of sparse attention is called {by!r}; {nearest(by, known)}"


def check_provider(by: str | None) -> None:
    if by is not None and (problem := _unknown(by)):
        raise ArgumentError(problem)


def _attend(*given: Any) -> torch.Tensor:
    """Choose the provider when the operator is traced or called, and call it."""
    *arguments, by, _identity = given
    bound = op.OP.bind(*arguments)
    if by is None:
        by, _ = tuning.choose_at_first_use(op.OP, bound)
    elif by != REFERENCE and (reason := ops.providers(op.OP)[by].decline(bound)):
        raise ArgumentError(f"provider {by!r} cannot compute this sparse attention: {reason}; by=None takes another")
    if compat.dynamo.is_compiling():
        q, queries, keys = bound.q, present(bound.q.shape[1]), present(bound.k.shape[1])
        what = f"{queries} queries in {present(bound.counts.shape[2])} blocks, {keys} keys"
        note_choice(by, f"sparse, {q.dtype} on {q.device.type}, {what}")
    return op.OP.overload(*arguments, provider=by)  # type: ignore[no-any-return]


_LIBRARY.impl("choose_sparse_attention", _attend, "CompositeImplicitAutograd")
