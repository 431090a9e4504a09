"""The provider `int8` of `block_sparse_attention`: attention in 8 bits that visits only the listed tiles of keys.

A block is a tile of the kernel, so blocks have at most 128 tokens and q, k and v are stored from edge to edge. On a CPU
`rounded_sparse_attention` computes, which is slow: it shows on any machine what the rounding does to images.
"""

from __future__ import annotations

import torch

from tritium import compat
from tritium.ops import attention
from tritium.ops.attention import eight_bits
from tritium.ops.attention.rounded import TILE, rounded_tiles
from tritium.ops.op import Arguments


def rounded_sparse_attention(given: Arguments) -> torch.Tensor:
    """Compute `block_sparse_attention` as the kernels do, in plain PyTorch: its definition, and the oracle of their tests."""
    q, k, v = (side.transpose(1, 2) for side in (given.q, given.k, given.v))
    return rounded_tiles(q, k, v, given.scale, edges=_edges(given), visits=_visits(given)).transpose(1, 2)


def _edges(given: Arguments) -> tuple[list[int], list[int]]:
    return tuple([int(place) for place in edges.tolist()] for edges in (given.q_edges, given.k_edges))  # type: ignore[return-value]


def _visits(given: Arguments) -> list[list[list[list[int]]]]:
    """Return the listed blocks of each block of queries, by sample and head."""
    listed, totals = given.indices.tolist(), given.counts[..., 1].tolist()
    return [
        [[row[:count] for row, count in zip(*of_head, strict=True)] for of_head in zip(*of_sample, strict=True)]
        for of_sample in zip(listed, totals, strict=True)
    ]


def run_int8(given: Arguments) -> torch.Tensor:
    if not given.q.is_cuda:
        return rounded_sparse_attention(given).contiguous()
    return launch(given)


def launch(given: Arguments) -> torch.Tensor:
    """Launch the kernels on a GPU."""
    kernels = eight_bits.loaded(given.q.device, given.q.dtype, listed=True)
    q, k, v = (side.transpose(1, 2) for side in (given.q, given.k, given.v))
    out = torch.empty(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    edges, columns = (given.q_edges.contiguous(), given.k_edges.contiguous()), given.indices.shape[-1]
    tiles = edges[0].shape[0] - 1, edges[1].shape[0] - 1
    stored = eight_bits.store(kernels, q, k, v, tiles, edges)
    counts, indices = given.counts.contiguous(), given.indices.contiguous()
    kernels["attend"].launch(
        (stored.blocks, 1, 1),
        *stored.arguments(out.transpose(1, 2), given.scale),
        *(counts, indices, *edges, columns),
    )
    return out


def decline_int8(given: Arguments) -> str | None:
    form = _dense(given)
    if reason := eight_bits.decline_form(form):
        return reason
    lists = (given.counts, given.indices, given.q_edges, given.k_edges)
    if any(numbers.dtype != torch.int32 for numbers in lists):
        return "it takes lists in int32"
    if given.block > TILE:
        return f"it takes blocks of up to {TILE} tokens, got {given.block}"
    if given.q.is_cuda:
        if given.block != TILE:
            return f"its kernels take blocks of {TILE} tokens, got {given.block}"
        return eight_bits.decline_on_a_gpu(form, listed=True)
    if any(compat.traced.is_traced(numbers) for numbers in lists):
        return "on a CPU it reads the lists, whose values a graph does not have"
    return eight_bits.decline(form)


def _dense(given: Arguments) -> Arguments:
    sides = {name: getattr(given, name).transpose(1, 2) for name in "qkv"}
    return attention.OP.bind(**sides, mask=None, scale=given.scale, causal=given.causal)
