"""Select the blocks of keys that each block of queries sees, as a boolean mask [B, N, R, C].

rainfusion   the blocks whose mean key is most similar to the mean query, the first frame and the text
estimated    the blocks with most of the attention, which is estimated along antidiagonals
radial       blocks near in space, in a window that narrows with the distance in time; the first frame and the text
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tritium.errors import ArgumentError
from tritium.layers.sparse.layout import TILE, SparseLayout

SparseType = Literal["rf_v2", "rf_v3", "ada_bsa", "radial"]
RF_V2, RF_V3, ADA_BSA, RADIAL = TYPES = get_args(SparseType)

# The number of queries, and of keys, that `estimated` scores together.
STRIDE = 8

# Added to the window that a pair of blocks needs, per frame of distance: less than any distance in space.
_TIE = 1e-9


@dataclass(frozen=True)
class Method:
    """The method and parameters of a sparse mask, independent of the streams."""

    # None for dense attention.
    sparse_type: str | None
    sparsity: float = 0.0
    # For `ada_bsa`: whether the first and the last block are always kept, and the share of the attention to keep.
    keep_sink: bool = True
    keep_recent: bool = True
    cdf_threshold: float = 1.0
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("sparsity", "cdf_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.sparse_type is None and self.sparsity != 0:
            raise ArgumentError(f"sparsity={self.sparsity} needs a sparse_type: {', '.join(TYPES)}")
        if self.causal and self.sparse_type not in (None, ADA_BSA):
            raise ArgumentError(
                f"sparse_type {self.sparse_type!r} reorders tokens, so is_causal has no meaning; 'ada_bsa' keeps the order"
            )

    @property
    def tile(self) -> int:
        """The side of the tiles that reorder frames; 1 for `radial` and `ada_bsa`, which keep the order."""
        return TILE if self.sparse_type in (RF_V2, RF_V3) else 1

    @property
    def is_dense(self) -> bool:
        """Whether every block is kept for any stream."""
        return self.sparsity == 0 and (self.sparse_type != ADA_BSA or self.cdf_threshold >= 1)

    def mask(
        self, q: torch.Tensor, k: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, scale: float
    ) -> torch.Tensor:
        """Return the mask [B or 1, N, R, C] over blocks of permuted streams [B, S, N, D]."""
        if self.sparse_type == RADIAL:
            return radial(q_layout, k_layout, self.sparsity, q.device).expand(1, q.shape[2], -1, -1)
        if self.sparse_type == ADA_BSA:
            return estimated(self, q, k, q_layout, k_layout, scale)
        return rainfusion(q, k, q_layout, k_layout, scale, self.sparsity)


def pooled(x: torch.Tensor, layout: SparseLayout) -> torch.Tensor:
    """Return the mean of each block of a permuted stream [B, S, N, D], in float32: [B, N, blocks, D]."""
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    sums = []
    for segment in wide.split([layout.video, layout.txt_len], dim=2):
        rest = -segment.shape[2] % layout.block_size
        filled = torch.nn.functional.pad(segment, (0, 0, 0, rest))
        sums.append(filled.unflatten(2, (-1, layout.block_size)).sum(3))
    return torch.cat(sums, dim=2) / layout.edges(x.device).diff().unsqueeze(1)


def keep_count(columns: int, sparsity: float) -> int:
    """Return how many of `columns` blocks are kept, at least one.

    >>> [keep_count(10, sparsity) for sparsity in (0.0, 0.5, 0.75, 0.9, 1.0)]
    [10, 5, 3, 1, 1]
    """
    # Ignore rounding errors above an integer: 10 * (1 - 0.7) is 3.0000000000000004.
    return max(1, math.ceil(columns * (1 - sparsity) - 1e-9))


def rainfusion(
    q: torch.Tensor, k: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, scale: float, sparsity: float
) -> torch.Tensor:
    """Keep a share of 1 - sparsity of the blocks, by the similarity of their means.

    Text and the first of several frames are always kept.
    """
    queries, keys = pooled(q, q_layout), pooled(k, k_layout)
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    # A softmax would keep the order, except among values that underflow to 0.
    likeness = queries @ keys.transpose(-2, -1) * scale
    kept = likeness.topk(keep_count(k_layout.blocks, sparsity), dim=-1).indices
    # Select by index: a threshold would keep more blocks if values are equal.
    mask = torch.zeros_like(likeness, dtype=torch.bool).scatter_(-1, kept, value=True)
    return mask | _always_seen(q_layout, k_layout, q.device)


def _always_seen(q_layout: SparseLayout, k_layout: SparseLayout, device: torch.device) -> torch.Tensor:
    """Return a mask [R, C] of the rows and columns of text and of the first of several frames."""
    rows, columns = (_anchors(layout, device) for layout in (q_layout, k_layout))
    return rows.unsqueeze(1) | columns.unsqueeze(0)


def _anchors(layout: SparseLayout, device: torch.device) -> torch.Tensor:
    frames, height, width = layout.latent_shape
    number = torch.arange(layout.blocks, device=device)
    first = -(-(height * width) // layout.block_size) if frames > 1 else 0
    return (number < first) | (number >= layout.video_blocks)


def radial(q_layout: SparseLayout, k_layout: SparseLayout, sparsity: float, device: torch.device) -> torch.Tensor:
    """Return windows in space, [1, 1, R, C], whose width halves when the distance in frames doubles.

    Their width is chosen to keep a share of 1 - sparsity of the blocks; text and the first frame are always kept. The mask
    does not depend on the stream's values, so all layers and steps can share it.
    """
    fixed = _always_seen(q_layout, k_layout, device)
    frame_q, place_q = _centres(q_layout, device)
    frame_k, place_k = _centres(k_layout, device)
    apart = (frame_q.unsqueeze(1) - frame_k.unsqueeze(0)).abs()
    halvings = torch.floor(torch.log2(apart.clamp(min=1).float()))
    # The width that the window at distance 0 needs to include a pair.
    needed = (place_q.unsqueeze(1) - place_k.unsqueeze(0)).abs().double() * torch.exp2(halvings)
    # Break ties by the distance in time: otherwise one place would be kept in all frames or in none.
    needed = needed + _TIE * apart
    nearest = torch.zeros_like(fixed).scatter_(1, needed.argmin(1, keepdim=True), value=True)
    needed = needed.masked_fill(fixed, -1.0)
    wanted = keep_count(needed.numel(), sparsity)
    limit = needed.flatten().sort().values[wanted - 1]
    return ((needed <= limit) | nearest | fixed)[None, None]


def _centres(layout: SparseLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frame of each block's middle token and its place there, 0 to 1; arbitrary for text."""
    _, height, width = layout.latent_shape
    edges = layout.edges(device).long()
    middle = (edges[:-1] + edges[1:] - 1).clamp(min=0) // 2
    area = height * width
    return middle // area, (middle % area).float() / area


def estimated(
    method: Method,
    q: torch.Tensor,
    k: torch.Tensor,
    q_layout: SparseLayout,
    k_layout: SparseLayout,
    scale: float,
) -> torch.Tensor:
    """Keep the fewest blocks with a share `cdf_threshold` of the estimated attention.

    At most a share of 1 - sparsity of the blocks is kept.
    `STRIDE` queries in reverse order are multiplied with as many keys at once, which samples every diagonal of the scores.
    Streams are not permuted and have no text.
    """
    share = _shares(q, k, q_layout, k_layout, scale, method.causal)
    rows, columns = share.shape[-2:]
    number = torch.arange(columns, device=q.device)
    last = torch.full((rows, 1), columns - 1, device=q.device)
    if method.causal:
        last = torch.arange(rows, device=q.device).unsqueeze(1).clamp(max=columns - 1)
    open_to = number <= last
    recent = (number == last) & method.keep_recent
    # Keep blocks whose estimate is NaN, so that NaN reaches the result as in dense attention.
    broken = share.isnan()
    # Blocks that are kept anyway do not compete.
    share = share.masked_fill(recent | ~open_to, 0.0)
    order = torch.sort(share.masked_fill(~open_to, -1.0), dim=-1, descending=True, stable=True)
    held = torch.cumsum(order.values.clamp(min=0.0), -1)
    count = (held < method.cdf_threshold * share.sum(-1, keepdim=True)).sum(-1, keepdim=True) + 1
    if method.cdf_threshold >= 1:
        count = torch.full_like(count, columns)
    # In float64: in float32 rounding can lose one block if the product is an integer.
    allowed = torch.floor((last + 1).double() * (1 - method.sparsity) + 1e-6).long().clamp(min=1)
    rank = torch.argsort(order.indices, dim=-1)
    mask = (rank < torch.minimum(count, allowed)) | recent | broken
    if method.keep_sink:
        mask = mask | (number == 0)
    if method.causal:
        mask = mask | (torch.arange(rows, device=q.device) < 2).unsqueeze(1)
    return mask & open_to


def _shares(
    q: torch.Tensor, k: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, scale: float, causal: bool
) -> torch.Tensor:
    """Return the estimated attention of each block of queries to each block of keys, [B, N, R, C]."""
    queries, keys = _grouped(q, reverse=True), _grouped(k, reverse=False)
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = queries @ keys.transpose(-2, -1) * (scale / STRIDE)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    cell = q_layout.block_size // STRIDE
    rows, columns = q_layout.blocks, k_layout.blocks
    fill = (0, columns * cell - weights.shape[-1], 0, rows * cell - weights.shape[-2])
    padded: torch.Tensor = torch.nn.functional.pad(weights, fill)
    return padded.reshape(*padded.shape[:2], rows, cell, columns, cell).sum((-1, -3))


def _grouped(x: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return a stream [B, S, N, D] as [B, N, S / STRIDE, STRIDE D]; the last group is padded with zeros."""
    wide = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    filled: torch.Tensor = torch.nn.functional.pad(wide, (0, 0, 0, -wide.shape[2] % STRIDE))
    groups = filled.reshape(*filled.shape[:2], -1, STRIDE, filled.shape[3])
    return (groups.flip(3) if reverse else groups).flatten(3)


def density(mask: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, causal: bool = False) -> torch.Tensor:
    """Return the share of dense attention's pairs of tokens that a mask keeps."""
    q_edges, k_edges = (layout.edges(mask.device).double() for layout in (q_layout, k_layout))
    pairs = (q_edges[1:] - q_edges[:-1]).unsqueeze(1) * (k_edges[1:] - k_edges[:-1])
    if causal:
        pairs = pairs * (k_edges[:-1] < q_edges[1:].unsqueeze(1))
    done = (mask * pairs).sum((-1, -2))
    return done.sum() / (pairs.sum() * (done.numel() or 1))
