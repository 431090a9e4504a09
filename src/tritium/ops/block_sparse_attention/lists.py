"""Convert a mask over blocks to the lists of blocks that a kernel reads."""

from __future__ import annotations

import torch


def block_lists(
    mask: torch.Tensor, q_edges: torch.Tensor, k_edges: torch.Tensor, block: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `counts` [B, N, R, 2] and `indices` [B, N, R, C] of a boolean mask [B, N, R, C] over blocks.

    Blocks whose keys are all seen by every query come first: the kernel needs no mask for them.
    """
    whole = (k_edges[1:] - k_edges[:-1] == block).expand(mask.shape[-2:])
    if causal:
        first_query, last_query = q_edges[:-1].unsqueeze(1), q_edges[1:].unsqueeze(1) - 1
        whole = whole & (k_edges[1:] - 1 <= first_query)
        mask = mask & (k_edges[:-1] <= last_query)
    # 0: seen whole, 1: seen in part, 2: not seen. A stable sort keeps the order of tokens within each kind.
    kind = torch.where(mask, torch.where(whole, 0, 1), 2).to(torch.uint8)
    indices = torch.sort(kind, dim=-1, stable=True).indices.to(torch.int32)
    counts = torch.stack([(mask & whole).sum(-1), mask.sum(-1)], dim=-1).to(torch.int32)
    return counts, indices
