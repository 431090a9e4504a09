"""Which blocks of keys each block of queries sees. Every function gives a boolean mask [B, N, R, C].

rainfusion   the blocks whose mean key is most like the mean query, the first frame and the text
estimated    the blocks that hold most of an attention that is estimated along antidiagonals
radial       blocks near in space, the nearer the farther they are in time; the first frame and the text
"""

from __future__ import annotations

import math

import torch

from tritium.layers.sparse.layout import SparseLayout

# Queries and keys that are judged together by `estimated`.
STRIDE = 8

# What a frame of distance adds to the window that a pair needs: less than any distance in space.
_TIE = 1e-9


def pooled(x: torch.Tensor, layout: SparseLayout) -> torch.Tensor:
    """The mean of each block of a permuted stream [B, S, N, D], in float32: [B, N, blocks, D]."""
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    parts = []
    for segment in wide.split([layout.video, layout.txt_len], dim=2):
        tokens, block = segment.shape[2], layout.block_size
        blocks = -(-tokens // block)
        sums = torch.nn.functional.pad(segment, (0, 0, 0, blocks * block - tokens)).unflatten(2, (blocks, block)).sum(3)
        sizes = torch.full((blocks, 1), float(block), device=x.device, dtype=sums.dtype)
        if blocks:
            sizes[-1] = tokens - (blocks - 1) * block
        parts.append(sums / sizes)
    return torch.cat(parts, dim=2)


def keep_count(columns: int, sparsity: float) -> int:
    """How many of some blocks are kept, at least one.

    >>> [keep_count(10, sparsity) for sparsity in (0.0, 0.5, 0.75, 0.9, 1.0)]
    [10, 5, 3, 1, 1]
    """
    # Less than a rounding error above a whole number is that number: 10 * (1 - 0.9) is 0.9999...
    return max(1, math.ceil(columns * (1 - sparsity) - 1e-9))


def rainfusion(
    q: torch.Tensor, k: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, scale: float, sparsity: float
) -> torch.Tensor:
    """A share of 1 - sparsity of the blocks by the likeness of their means; text and the first of several frames always."""
    queries, keys = pooled(q, q_layout), pooled(k, k_layout)
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    # Its softmax has the same order, but for what is so much less alike that it would be 0.
    likeness = queries @ keys.transpose(-2, -1) * scale
    kept = likeness.topk(keep_count(k_layout.blocks, sparsity), dim=-1).indices
    # By number, not by value: equal values would keep more.
    mask = torch.zeros_like(likeness, dtype=torch.bool).scatter_(-1, kept, value=True)
    return mask | _always_seen(q_layout, k_layout, q.device)


def _always_seen(q_layout: SparseLayout, k_layout: SparseLayout, device: torch.device) -> torch.Tensor:
    """The rows and columns of text and of the first frame, [R, C]. One frame alone has no first."""
    rows, columns = (_anchors(layout, device) for layout in (q_layout, k_layout))
    return rows.unsqueeze(1) | columns.unsqueeze(0)


def _anchors(layout: SparseLayout, device: torch.device) -> torch.Tensor:
    frames, height, width = layout.latent_shape
    number = torch.arange(layout.blocks, device=device)
    first = -(-(height * width) // layout.block_size) if frames > 1 else 0
    return (number < first) | (number >= layout.video_blocks)


def radial(q_layout: SparseLayout, k_layout: SparseLayout, sparsity: float, device: torch.device) -> torch.Tensor:
    """Windows in space that are halved each time the distance in frames doubles, [1, 1, R, C].

    They are as narrow as a share of 1 - sparsity of the blocks allows; text and the first frame are always seen. It depends
    on no number of the stream, so one mask serves all layers and steps.
    """
    fixed = _always_seen(q_layout, k_layout, device)
    frame_q, place_q = _centres(q_layout, device)
    frame_k, place_k = _centres(k_layout, device)
    apart = (frame_q.unsqueeze(1) - frame_k.unsqueeze(0)).abs()
    halvings = torch.floor(torch.log2(apart.clamp(min=1).float()))
    # How wide the window at distance 0 must be for a pair to be seen.
    needed = (place_q.unsqueeze(1) - place_k.unsqueeze(0)).abs().double() * torch.exp2(halvings)
    # Of blocks that need the same the nearer in time: one place of all frames would otherwise be seen whole or not at all.
    needed = needed + _TIE * apart
    nearest = torch.zeros_like(fixed).scatter_(1, needed.argmin(1, keepdim=True), value=True)
    needed = needed.masked_fill(fixed, -1.0)
    wanted = keep_count(needed.numel(), sparsity)
    limit = needed.flatten().sort().values[wanted - 1]
    return ((needed <= limit) | nearest | fixed)[None, None]


def _centres(layout: SparseLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The frame of each block's middle token, and its place in there from 0 to 1. Text is nowhere."""
    _, height, width = layout.latent_shape
    edges = layout.edges(device).long()
    middle = (edges[:-1] + edges[1:] - 1).clamp(min=0) // 2
    area = height * width
    return middle // area, (middle % area).float() / area


def estimated(
    q: torch.Tensor,
    k: torch.Tensor,
    q_layout: SparseLayout,
    k_layout: SparseLayout,
    scale: float,
    sparsity: float,
    *,
    threshold: float,
    keep_sink: bool,
    keep_recent: bool,
    causal: bool,
) -> torch.Tensor:
    """The fewest blocks that hold a share `threshold` of the estimated attention, and at most 1 - sparsity of them.

    `STRIDE` queries, in reverse, are compared with as many keys at once, which meets every diagonal of the scores. The
    first block and the last one are always seen, if they are asked for. Streams are in their own order, without text.
    """
    share = _shares(q, k, q_layout, k_layout, scale, causal)
    rows, columns = share.shape[-2:]
    number = torch.arange(columns, device=q.device)
    last = torch.full((rows, 1), columns - 1, device=q.device)
    if causal:
        last = torch.arange(rows, device=q.device).unsqueeze(1).clamp(max=columns - 1)
    open_to = number <= last
    recent = (number == last) & keep_recent
    # What is no number shows, as it does in dense attention.
    broken = share.isnan()
    # What is seen anyway does not compete.
    share = share.masked_fill(recent | ~open_to, 0.0)
    order = torch.sort(share.masked_fill(~open_to, -1.0), dim=-1, descending=True, stable=True)
    held = torch.cumsum(order.values.clamp(min=0.0), -1)
    count = (held < threshold * share.sum(-1, keepdim=True)).sum(-1, keepdim=True) + 1
    if threshold >= 1:
        count = torch.full_like(count, columns)
    # In float64: in float32 whole numbers of blocks come out one less.
    allowed = torch.floor((last + 1).double() * (1 - sparsity) + 1e-6).long().clamp(min=1)
    rank = torch.argsort(order.indices, dim=-1)
    mask = (rank < torch.minimum(count, allowed)) | recent | broken
    if keep_sink:
        mask = mask | (number == 0)
    if causal:
        mask = mask | (torch.arange(rows, device=q.device) < 2).unsqueeze(1)
    return mask & open_to


def _shares(
    q: torch.Tensor, k: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, scale: float, causal: bool
) -> torch.Tensor:
    """The estimated attention of each block of queries to each block of keys, [B, N, R, C]."""
    queries, keys = _grouped(q, reverse=True), _grouped(k, reverse=False)
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = queries @ keys.transpose(-2, -1) * (scale / STRIDE)
    if causal:
        above = torch.arange(scores.shape[-1], device=q.device) > torch.arange(
            scores.shape[-2], device=q.device
        ).unsqueeze(1)
        scores = scores.masked_fill(above, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    cell = q_layout.block_size // STRIDE
    rows, columns = q_layout.blocks, k_layout.blocks
    fill = (0, columns * cell - weights.shape[-1], 0, rows * cell - weights.shape[-2])
    padded: torch.Tensor = torch.nn.functional.pad(weights, fill)
    return padded.reshape(*padded.shape[:2], rows, cell, columns, cell).sum((-1, -3))


def _grouped(x: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """A stream [B, S, N, D] as rows of `STRIDE` tokens, [B, N, S / STRIDE, STRIDE D]; a short last group has zeros."""
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    filled: torch.Tensor = torch.nn.functional.pad(wide, (0, 0, 0, -wide.shape[2] % STRIDE))
    groups = filled.reshape(*filled.shape[:2], -1, STRIDE, filled.shape[3])
    return (groups.flip(3) if reverse else groups).flatten(3)


def density(mask: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, causal: bool = False) -> torch.Tensor:
    """The share of what dense attention computes that a mask keeps: pairs of tokens in blocks that are seen."""
    q_edges, k_edges = (layout.edges(mask.device).double() for layout in (q_layout, k_layout))
    pairs = (q_edges[1:] - q_edges[:-1]).unsqueeze(1) * (k_edges[1:] - k_edges[:-1])
    if causal:
        pairs = pairs * (k_edges[:-1] < q_edges[1:].unsqueeze(1))
    done = (mask * pairs).sum((-1, -2))
    return done.sum() / (pairs.sum() * (done.numel() or 1))
