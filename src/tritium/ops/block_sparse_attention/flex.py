"""`block_sparse_attention` by FlexAttention, compiled by Inductor."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritium.compat import attention as compat_attention
from tritium.ops.attention import providers
from tritium.ops.attention.reference import Sizes
from tritium.ops.op import Arguments


def run_flex(given: Arguments) -> torch.Tensor:
    """Compute on blocks of one size: shorter ones are padded and masked."""
    q, block, causal = given.q, given.block, given.causal
    (q_slots, q_inside), (k_slots, k_inside) = (_slots(edges, block) for edges in (given.q_edges, given.k_edges))
    sides = ((q, q_slots), (given.k, k_slots), (given.v, k_slots))
    wide = [tensor.index_select(1, slots).transpose(1, 2) for tensor, slots in sides]

    def seen(b: Any, h: Any, row: Any, column: Any) -> Any:
        del b, h
        return k_inside[column] & (k_slots[column] <= q_slots[row]) if causal else k_inside[column]

    whole, listed, indices = given.counts[..., 0], given.counts[..., 1], given.indices
    # `indices` lists whole blocks before partly masked ones: rotate the latter to the front of a second list.
    places = (torch.arange(indices.shape[-1], device=q.device) + whole.unsqueeze(-1)) % max(1, indices.shape[-1])
    # Import late: it imports the compiler.
    from torch.nn.attention.flex_attention import BlockMask

    mask = BlockMask.from_kv_blocks(
        (listed - whole).contiguous(),
        indices.gather(-1, places),
        whole.contiguous(),
        indices,
        BLOCK_SIZE=block,
        mask_mod=seen,
        seq_lengths=(q_slots.shape[0], k_slots.shape[0]),
    )
    out = compat_attention.flex_attention(
        *wide,
        block_mask=mask,
        scale=given.scale,
        enable_gqa=q.shape[2] != given.k.shape[2],
        kernel_options=_tiles(q, block),
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


def dense(given: Arguments) -> Arguments:
    """Return the arguments of the same attention without lists of blocks."""
    sides = {name: getattr(given, name).transpose(1, 2) for name in "qkv"}
    return Arguments(**sides, mask=None, scale=given.scale, causal=given.causal)


def decline_flex(given: Arguments) -> str | None:
    form = dense(given)
    return "it takes at least one sample, query and key" if 0 in Sizes.of(form) else providers.decline_flex(form)
