"""Attention with a mask over blocks, by the Triton kernel, FlexAttention or the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat, fidelity, ops
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, nearest
from tritium.layers import checks
from tritium.layers.attention import choice
from tritium.layers.attention.operator import note_choice
from tritium.layers.attention.request import Request
from tritium.layers.attention.table import Row
from tritium.ops import block_sparse_attention as op
from tritium.ops.block_sparse_attention import block_lists
from tritium.ops.op import present

TRITON, FLEX, REFERENCE = WAYS = ("triton", "flex", "reference")

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor counts, Tensor indices, Tensor q_edges, Tensor k_edges, int block, "
    "float scale, bool causal"
)
_LIBRARY.define(f"sparse_attention{_ARGUMENTS}, str? by, str identity) -> Tensor")
_LIBRARY.define(f"sparse_attention_by_flex{_ARGUMENTS}) -> Tensor")


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
    check_way(by)
    checks.no_gradients_in_a_graph("sparse attention", q, k, v)
    if compat.dynamo.is_mapped(*lists):
        # Under vmap neither way has gradients: the reference reads the lists' values, and the operator has no backward.
        if torch.is_grad_enabled():
            raise ArgumentError("sparse attention is mapped over under torch.no_grad() alone; its batch needs no vmap")
    elif checks.needs_gradients(q, k, v):
        if by not in (None, REFERENCE):
            raise ArgumentError(f"sparse attention by {by!r} computes no gradients; by {REFERENCE!r} it does")
        return _with_gradients(q, k, v, *lists, q_edges, k_edges, block, scale, causal)  # type: ignore[no-any-return]
    given = (q, k, v, *lists, q_edges, k_edges, block, scale, causal)
    known = choice.identity() if torch.compiler.is_compiling() else ""
    return torch.ops.tritium.sparse_attention.default(*given, by, known)  # type: ignore[no-any-return]


# Untraced: it loops over lists of blocks by their values, which a graph cannot do.
_with_gradients = compat.dynamo.untraced(op.OP.reference)


def check_way(by: str | None) -> None:
    if by is not None and by not in WAYS:
        raise ArgumentError(f"nothing computes sparse attention by {by!r}; {nearest(str(by), WAYS)}")


def _attend(*given: Any) -> torch.Tensor:
    """Choose the way to compute when the operator is traced or called, and call it."""
    *arguments, by, _identity = given
    # The call of `ops.providers` also registers the op with PyTorch.
    triton = ops.providers(op.OP)[TRITON]
    reason = triton.decline(op.OP.bind(*arguments))
    if by is None:
        by = _fastest(arguments) if reason is None else _without_kernel(arguments[0])
    elif by == TRITON and reason is not None:
        raise ArgumentError(f"the Triton kernel cannot compute this sparse attention: {reason}")
    if compat.dynamo.is_compiling():
        q, k, _, counts, *_ = arguments
        queries, keys, blocks = present(q.shape[1]), present(k.shape[1]), present(counts.shape[2])
        what = f"{queries} queries in {blocks} blocks, {keys} keys"
        note_choice(by, f"sparse, {q.dtype} on {q.device.type}, {what}")
    if by == FLEX:
        return torch.ops.tritium.sparse_attention_by_flex.default(*arguments)  # type: ignore[no-any-return]
    return op.OP.overload(*arguments, provider=by)  # type: ignore[no-any-return]


def _without_kernel(q: torch.Tensor) -> str:
    return FLEX if q.is_cuda and not compat.dynamo.is_compiling() else REFERENCE


def _fastest(arguments: list[Any]) -> str:
    """Return the Triton kernel, or FlexAttention if it was measured as faster."""
    q, k, v, *_, block, _, causal = arguments
    if not q.is_cuda:
        return TRITON
    request = Request.of(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, causal)
    key = f"sparse block={block} {request.key()}"
    # FlexAttention cannot be compiled during another compilation: use a known row, else the kernel.
    measured = None if compat.dynamo.is_compiling() else functools.partial(_compared, key, arguments)
    row = choice.recall(q.device, key, measured)
    return row.winner if row is not None else TRITON


def _compared(key: str, arguments: list[Any]) -> Row:
    """Time both on the arguments of this call: the number of listed blocks decides which is faster."""
    triton = ops.providers(op.OP)[TRITON]
    ways: dict[str, Callable[..., Any]] = {TRITON: lambda *given: triton.run(op.OP.bind(*given)), FLEX: by_flex}
    runs = {name: functools.partial(run, *arguments) for name, run in ways.items()}
    dropped: dict[str, str] = {}
    with torch.inference_mode():
        torch.cuda.set_device(arguments[0].device)
        # This thread uses another stream: wait until the arguments are computed.
        torch.cuda.synchronize()
        plain = runs[TRITON]()
        try:
            found = fidelity.error(runs[FLEX](), plain.double())
            limit = 32 * torch.finfo(plain.dtype).eps
            if not found <= limit:
                dropped[FLEX] = f"it differs from the kernel by {found:.2e}, allowed {limit:.2e}"
        except Exception as error:  # noqa: BLE001 - compilers raise many types: dropped with the reason in the table
            dropped[FLEX] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        ms = choice.timed({name: run for name, run in runs.items() if name not in dropped}, "cuda")
    return Row(key, min(ms, key=lambda name: ms[name]), ms, dropped, compat_attention.versions())


def by_flex(
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
    """Compute by FlexAttention; its blocks have one size, so shorter ones are padded and masked."""
    (q_slots, q_inside), (k_slots, k_inside) = (_slots(edges, block) for edges in (q_edges, k_edges))
    wide = [t.index_select(1, slots).transpose(1, 2) for t, slots in ((q, q_slots), (k, k_slots), (v, k_slots))]

    def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
        del b, h
        return k_inside[column] & (k_slots[column] <= q_slots[row]) if causal else k_inside[column]

    whole, listed = counts[..., 0], counts[..., 1]
    # `indices` lists whole blocks before partly masked ones: rotate the latter to the front of a second list.
    places = (torch.arange(indices.shape[-1], device=q.device) + whole.unsqueeze(-1)) % max(1, indices.shape[-1])
    masked = indices.gather(-1, places)
    mask = compat_attention.block_mask_class().from_kv_blocks(
        (listed - whole).contiguous(), masked, whole.contiguous(), indices, BLOCK_SIZE=block, mask_mod=seen,
        seq_lengths=(q_slots.shape[0], k_slots.shape[0]),
    )  # fmt: skip
    grouped = q.shape[2] != k.shape[2]
    out = compat_attention.flex_attention(
        *wide, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=_tiles(q, block)
    )
    kept = torch.nonzero(q_inside).squeeze(1)
    result: torch.Tensor = out.transpose(1, 2).index_select(1, kept).contiguous()
    return result


def _tiles(q: torch.Tensor, block: int) -> dict[str, int] | None:
    """Return smaller tiles for FlexAttention on a GPU if its default of 128 does not divide the block."""
    if not q.is_cuda or block % 128 == 0:
        return None
    side = math.gcd(block, 64 if q.dtype.itemsize == 2 else 32)
    return {"BLOCK_M": side, "BLOCK_N": side}


def _slots(edges: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token index for each slot of the padded blocks, and whether the slot is a real token."""
    places = edges[:-1].unsqueeze(1) + torch.arange(block, device=edges.device)
    inside = places < edges[1:].unsqueeze(1)
    return torch.where(inside, places, edges[:-1].unsqueeze(1)).flatten().long(), inside.flatten()


def lists_of(
    mask: torch.Tensor, q_edges: torch.Tensor, k_edges: torch.Tensor, block: int, batch: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block lists of a mask [B or 1, N or 1, R, C] for a batch."""
    return block_lists(mask.expand(batch, *mask.shape[1:]), q_edges, k_edges, block, causal)


_LIBRARY.impl("sparse_attention", _attend, "CompositeImplicitAutograd")
_LIBRARY.impl("sparse_attention_by_flex", by_flex, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::sparse_attention_by_flex", op.OP.fake, lib=_LIBRARY)
