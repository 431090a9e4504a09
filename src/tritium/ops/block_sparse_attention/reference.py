"""The reference and samples of `block_sparse_attention`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tritium.ops.block_sparse_attention.lists import block_lists
from tritium.ops.op import Sample


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


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(43)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def edges(segments: Sequence[int], block: int) -> torch.Tensor:
        places = [0]
        for length in segments:
            start = places[-1]
            places += [min(place + block, start + length) for place in range(start, start + length, block)]
        return torch.tensor(places, dtype=torch.int32, device=device_type)

    def arguments(
        queries: Sequence[int],
        keys: Sequence[int],
        block: int,
        *,
        width: int = 64,
        heads: int = 2,
        kv_heads: int | None = None,
        batch: int = 1,
        density: float = 0.5,
        causal: bool = False,
        transposed: bool = False,
    ) -> dict[str, Any]:
        q_edges, k_edges = edges(queries, block), edges(keys, block)
        shape = batch, heads, len(q_edges) - 1, len(k_edges) - 1
        mask = torch.rand(shape, generator=generator, device=device_type) < density
        counts, indices = block_lists(mask, q_edges, k_edges, block, causal)

        def tokens(count: int, heads: int) -> torch.Tensor:
            if transposed:
                return random(batch, heads, count, width).transpose(1, 2)
            return random(batch, count, heads, width)

        own = {"q": tokens(sum(queries), heads)}
        own |= {name: tokens(sum(keys), kv_heads or heads) for name in "kv"}
        lists = {"counts": counts, "indices": indices, "q_edges": q_edges, "k_edges": k_edges}
        return {**own, **lists, "block": block, "scale": width**-0.5, "causal": causal}

    yield Sample("one token", arguments((1,), (1,), 16, density=1.0))
    yield Sample("less than a block", arguments((7,), (5,), 16, density=1.0))
    yield Sample("all blocks", arguments((63,), (100,), 32, density=1.0))
    yield Sample("video and text, neither a multiple", arguments((100, 7), (100, 7), 16))
    yield Sample("heads of 128", arguments((63, 20), (63, 20), 32, width=128))
    yield Sample("blocks of 128", arguments((200, 33), (150, 129), 128, width=128))
    yield Sample("blocks of 64, several samples", arguments((100,), (130, 3), 64, batch=3))
    yield Sample("fewer heads of keys", arguments((50,), (63,), 16, heads=6, kv_heads=2))
    yield Sample("some queries see nothing", arguments((100,), (100,), 16, density=0.1))
    yield Sample("nobody sees anything", arguments((20,), (20,), 16, density=0.0))
    yield Sample("causal", arguments((100,), (100,), 16, density=0.7, causal=True))
    yield Sample("causal, more keys", arguments((33,), (63,), 32, density=1.0, causal=True))
    yield Sample("heads first in memory", arguments((63, 7), (63, 7), 16, transposed=True))
    yield Sample("heads of another width", arguments((63,), (63,), 16, width=40))
    yield Sample("no queries", arguments((), (63,), 16))
    yield Sample("many queries", arguments((3072,), (200,), 128, heads=1, density=0.3))
    yield Sample("many keys", arguments((7,), (5120,), 128, heads=1, density=0.1))
