"""The reference of `block_sparse_attention`, its lists of blocks, and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tritium.ops.op import Draw, Samples


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


def reference(
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
    """Compute one block of queries at a time; blocks of keys that are not listed are not read."""
    del block
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[2] // k.shape[2]
    starts, ends = ([int(place) for place in edges.tolist()] for edges in (q_edges, k_edges))
    numbers = torch.arange(k.shape[1], device=k.device)
    seen, listed = counts[..., 1].long().tolist(), indices.long().tolist()
    for sample, heads in enumerate(seen):
        for head, rows in enumerate(heads):
            for row, count in enumerate(rows):
                first, last = starts[row], starts[row + 1]
                kept = sorted(listed[sample][head][row][:count])
                if first == last or not kept:
                    continue
                tokens = torch.cat([numbers[ends[index] : ends[index + 1]] for index in kept])
                keys, values = (t[sample, :, head // group].index_select(0, tokens).to(wide) for t in (k, v))
                scores = q[sample, first:last, head].to(wide) @ keys.t() * scale
                if causal:
                    scores.masked_fill_(tokens > numbers.new_tensor(range(first, last)).unsqueeze(1), -math.inf)
                weights = torch.softmax(scores, -1)
                if causal:
                    # Not in place: the backward needs the softmax's result.
                    weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
                out[sample, first:last, head] = (weights @ values).to(q.dtype)
    return out


def draw_samples(draw: Draw) -> Samples:
    where = draw(0).device

    def edges(segments: Sequence[int], block: int) -> torch.Tensor:
        places = [0]
        for length in segments:
            start = places[-1]
            places += [min(place + block, start + length) for place in range(start, start + length, block)]
        return torch.tensor(places, dtype=torch.int32, device=where)

    def sample(
        queries: Sequence[int],
        keys: Sequence[int],
        block: int,
        density: float = 0.5,
        *,
        width: int = 64,
        heads: int = 2,
        kv_heads: int | None = None,
        batch: int = 1,
        causal: bool = False,
    ) -> dict[str, Any]:
        q_edges, k_edges = edges(queries, block), edges(keys, block)
        shape = batch, heads, len(q_edges) - 1, len(k_edges) - 1
        mask = torch.special.ndtr(draw(*shape, dtype=torch.float32)) < density
        counts, indices = block_lists(mask, q_edges, k_edges, block, causal)
        q = draw(batch, sum(queries), heads, width)
        k, v = (draw(batch, sum(keys), kv_heads or heads, width) for _ in "kv")
        lists = {"counts": counts, "indices": indices, "q_edges": q_edges, "k_edges": k_edges}
        return {"q": q, "k": k, "v": v, **lists, "block": block, "scale": width**-0.5, "causal": causal}

    yield "one token", sample((1,), (1,), 16, 1.0)
    yield "less than a block", sample((7,), (5,), 16, 1.0)
    yield "all blocks", sample((63,), (100,), 32, 1.0)
    yield "video and text, neither a multiple", sample((100, 7), (100, 7), 16)
    yield "heads of 128", sample((63, 20), (63, 20), 32, width=128)
    yield "blocks of 128", sample((200, 33), (150, 129), 128, width=128)
    yield "blocks of 64, several samples", sample((100,), (130, 3), 64, batch=3)
    yield "fewer heads of keys", sample((50,), (63,), 16, heads=6, kv_heads=2)
    yield "some queries see nothing", sample((100,), (100,), 16, 0.1)
    yield "nobody sees anything", sample((20,), (20,), 16, 0.0)
    yield "causal", sample((100,), (100,), 16, 0.7, causal=True)
    yield "causal, more keys", sample((33,), (63,), 32, 1.0, causal=True)
    transposed = sample((63, 7), (63, 7), 16)
    transposed |= {name: draw(1, 2, 70, 64).transpose(1, 2) for name in "qkv"}
    yield "heads first in memory", transposed
    yield "heads of another width", sample((63,), (63,), 16, width=40)
    yield "no queries", sample((), (63,), 16)
    yield "many queries", sample((3072,), (200,), 128, 0.3, heads=1)
    yield "many keys", sample((7,), (5120,), 128, 0.1, heads=1)
