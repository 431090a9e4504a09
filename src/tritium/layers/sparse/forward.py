"""`sparse_attention`: attention that skips the blocks of keys that matter least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import checked
from tritium.layers.attention.forward import attention_forward, check_streams, with_positive_scale
from tritium.layers.autocast import under_autocast
from tritium.layers.sparse import masks
from tritium.layers.sparse.choose import attend, check_provider
from tritium.layers.sparse.layout import TILE, SparseLayout
from tritium.ops.block_sparse_attention import block_lists

SparseType = Literal["rf_v2", "rf_v3", "ada_bsa", "radial"]
RF_V2, RF_V3, ADA_BSA, RADIAL = TYPES = get_args(SparseType)


@dataclass(frozen=True)
class Method:
    """The method and parameters of a sparse mask, independent of the streams."""

    sparse_type: str
    sparsity: float = 0.0
    keep_sink: bool = True
    keep_recent: bool = True
    cdf_threshold: float = 1.0
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("sparsity", "cdf_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.causal and self.sparse_type != ADA_BSA:
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
            return masks.radial(q_layout, k_layout, self.sparsity, q.device).expand(1, q.shape[2], -1, -1)
        if self.sparse_type != ADA_BSA:
            return masks.rainfusion(q, k, q_layout, k_layout, scale, self.sparsity)
        return masks.estimated(
            q,
            k,
            q_layout,
            k_layout,
            scale,
            self.sparsity,
            threshold=self.cdf_threshold,
            keep_sink=self.keep_sink,
            keep_recent=self.keep_recent,
            causal=self.causal,
        )


@checked(any_dtype=("attn_mask",))
@under_autocast
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int = 1,
    input_layout: Literal["BNSD", "BSND"] = "BNSD",
    sparse_type: SparseType | None = None,
    txt_len: int = 0,
    block_size: int = 128,
    latent_shape_q: tuple[int, int, int] | None = None,
    latent_shape_k: tuple[int, int, int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float = 0.0,
    *,
    return_density: bool = False,
    by: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over the most important blocks of keys; with sparsity 0 it is dense attention.

    Args:
        q: [B, N, S, D], or [B, S, N, D] with input_layout `BSND`: text first, then the latent row by row.
        k: As q; it may have fewer heads, a divisor of q's, and other tokens, given by `latent_shape_k`.
        v: As k.
        attn_mask: Only without a sparse_type: no sparse method applies a second mask.
        scale: D ** -0.5 if None.
        is_causal: Only for `ada_bsa` and without a sparse_type.
        head_num: The number of q's heads, or 1 to skip the check.
        input_layout: `BNSD` or `BSND`, also of the result.
        sparse_type: None for dense attention; `rf_v2` and `rf_v3` keep blocks by the similarity of their means,
            `ada_bsa` by an estimate of the attention, `radial` by distance in space and time.
        txt_len: The tokens of text in front of the latent, which all queries see; `ada_bsa` treats them like others.
        block_size: The tokens of a block.
        latent_shape_q: (frames, height, width) of q's latent in tokens; optional for `ada_bsa`.
        latent_shape_k: The same for k; q's if None.
        keep_sink: With `ada_bsa`, whether the first block is always kept.
        keep_recent: With `ada_bsa`, whether the last block is always kept.
        cdf_threshold: With `ada_bsa`, the share of the estimated attention that kept blocks must contain.
        sparsity: The share of blocks to skip, from 0 to 1, before the blocks that are always kept are added.
        return_density: Whether to also return the computed share of dense attention's work.
        by: The implementation: `triton`, `flex` or `reference`; None for the fastest.
    """
    check_provider(by)
    heads_first = input_layout == "BNSD"
    check_streams(("q", "k", "v"), q, k, v, heads_first=heads_first)
    heads = q.shape[1 if heads_first else 2]
    if head_num not in (1, heads):
        raise ArgumentError(f"head_num={head_num}, and q has {heads} heads: {tuple(q.shape)}")
    if heads_first:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    share = None
    if sparse_type is None:
        if sparsity != 0:
            raise ArgumentError(f"sparsity={sparsity} needs a sparse_type: {', '.join(TYPES)}")
        out = attention_forward(q, k, v, attn_mask, scale, is_causal=is_causal, enable_gqa=True)
    else:
        if attn_mask is not None:
            raise ArgumentError(f"sparse_type {sparse_type!r} applies no attn_mask; sparse_type=None does")
        method = Method(sparse_type, sparsity, keep_sink, keep_recent, cdf_threshold, is_causal)
        q_layout, k_layout = layouts(method, q, k, txt_len, block_size, latent_shape_q, latent_shape_k)
        if method.is_dense:
            out = attention_forward(q, k, v, None, scale, is_causal=is_causal, enable_gqa=True)
        else:
            q, factor = with_positive_scale(q, (q.shape[-1] or 1) ** -0.5 if scale is None else float(scale))
            out, share = _sparse(method, q, k, v, q_layout, k_layout, factor, return_density, by)
    if heads_first:
        out = out.transpose(1, 2)
    if not return_density:
        return out
    return out, torch.ones((), dtype=torch.float64, device=q.device) if share is None else share


def _sparse(
    method: Method,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_layout: SparseLayout,
    k_layout: SparseLayout,
    scale: float,
    return_density: bool,
    by: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    reordered = method.sparse_type != ADA_BSA
    if reordered:
        q, k, v = q_layout.permute(q), k_layout.permute(k), k_layout.permute(v)
    mask = method.mask(q, k, q_layout, k_layout, scale)
    q_edges, k_edges, block = q_layout.edges(q.device), k_layout.edges(q.device), q_layout.block_size
    lists = lists_of(mask, q_edges, k_edges, block, q.shape[0], method.causal)
    out = attend(q, k, v, lists, q_edges, k_edges, block, scale, method.causal, by)
    share = masks.density(mask, q_layout, k_layout, method.causal) if return_density else None
    return q_layout.unpermute(out) if reordered else out, share


def lists_of(
    mask: torch.Tensor, q_edges: torch.Tensor, k_edges: torch.Tensor, block: int, batch: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block lists of a mask [B or 1, N or 1, R, C] for a batch."""
    return block_lists(mask.expand(batch, *mask.shape[1:]), q_edges, k_edges, block, causal)


def layouts(
    method: Method,
    q: torch.Tensor,
    k: torch.Tensor,
    txt_len: int,
    block_size: int,
    latent_shape_q: tuple[int, int, int] | None,
    latent_shape_k: tuple[int, int, int] | None,
) -> tuple[SparseLayout, SparseLayout]:
    """Return the layouts of q and k, [B, S, N, D]; raise if the latent shapes do not match their tokens."""
    estimated = method.sparse_type == ADA_BSA
    if estimated and block_size % masks.STRIDE:
        raise ArgumentError(f"'ada_bsa' takes blocks of a multiple of {masks.STRIDE} tokens, got {block_size}")
    if latent_shape_q is None and not estimated:
        raise ArgumentTypeError(
            f"sparse_type {method.sparse_type!r} needs latent_shape_q=(frames, height, width), got None"
        )
    made = []
    for name, own, tensor in (("q", latent_shape_q, q), ("k", latent_shape_k, k)):
        if tensor.shape[1] == 0:
            raise ArgumentError(f"{name} has no tokens, of which a block could be made: {tuple(tensor.shape)}")
        # `ada_bsa` needs no shapes: check each given one against its stream, without a default from q.
        shape = latent_shape_q if own is None and not estimated else own
        layout = SparseLayout((1, 1, 1) if shape is None else shape, txt_len, block_size, tile=method.tile)
        if shape is not None and layout.tokens != tensor.shape[1]:
            raise ArgumentError(
                f"{name} has {tensor.shape[1]} tokens; txt_len={txt_len} and latent_shape_{name}={tuple(shape)} make "
                f"{layout.tokens}"
            )
        made.append(SparseLayout.plain(tensor.shape[1], block_size) if estimated else layout)
    return made[0], made[1]
