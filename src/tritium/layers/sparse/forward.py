"""`sparse_attention`: attention that skips the blocks of keys that matter least."""

from __future__ import annotations

from typing import Literal

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import checked, refuse_gradients_in_a_graph, under_autocast
from tritium.layers.attention.forward import attention_forward, check_streams, with_positive_scale
from tritium.layers.choose import LOSSY, RUNTIME, SPARSE, check_name, compute
from tritium.layers.sparse import masks
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import ADA_BSA, Method, SparseType
from tritium.ops import REFERENCE
from tritium.ops import block_sparse_attention as op


def lists_of(
    mask: torch.Tensor, q_layout: SparseLayout, k_layout: SparseLayout, batch: int, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block lists of a mask [B or 1, N or 1, R, C] for a batch."""
    q_edges, k_edges = q_layout.edges(mask.device), k_layout.edges(mask.device)
    return op.block_lists(mask.expand(batch, *mask.shape[1:]), q_edges, k_edges, q_layout.block_size, causal)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: tuple[torch.Tensor, torch.Tensor],
    q_layout: SparseLayout,
    k_layout: SparseLayout,
    scale: float,
    causal: bool = False,
    by: str | None = None,
) -> torch.Tensor:
    """Compute attention of permuted streams [B, S, N, D] over lists of blocks; `by=None`: fastest."""
    refuse_gradients_in_a_graph("sparse attention", q, k, v)
    edges = q_layout.edges(q.device), k_layout.edges(q.device)
    given = (q, k, v, *lists, *edges, q_layout.block_size, scale, causal)
    if compat.dynamo.is_mapped(*lists):
        # Under vmap the reference cannot read the lists, and the operator has no backward.
        if torch.is_grad_enabled():
            raise ArgumentError("vmap over sparse attention computes no gradients: call it under torch.no_grad()")
    elif compat.dynamo.needs_gradients(q, k, v):
        if by not in (None, REFERENCE) and not by.startswith(f"{LOSSY}:"):
            raise ArgumentError(f"sparse attention by {by!r} computes no gradients; by {REFERENCE!r} it does")
        return _with_gradients(*given)  # type: ignore[no-any-return]
    return compute(SPARSE, by or RUNTIME, *given)


# Untraced: it loops over lists of blocks by their values, which a graph cannot do.
_with_gradients = compat.dynamo.untraced(op.reference)


@checked
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
        by: The implementation: `triton`, `flex`, `int8` (attention in 8 bits, lossy) or `reference`; None for the fastest
            of the exact ones.
    """
    check_name(SPARSE, by)
    heads_first = input_layout == "BNSD"
    check_streams({"q": q, "k": k, "v": v}, heads=1 if heads_first else 2)
    if heads_first:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if head_num not in (1, q.shape[2]):
        raise ArgumentError(f"head_num={head_num}, and q has {q.shape[2]} heads")
    if sparse_type is not None and attn_mask is not None:
        raise ArgumentError(f"sparse_type {sparse_type!r} applies no attn_mask; sparse_type=None does")
    method = Method(sparse_type, sparsity, keep_sink, keep_recent, cdf_threshold, is_causal)
    if sparse_type is not None:
        q_layout = _layout("q", q, method, latent_shape_q, txt_len, block_size)
        # `ada_bsa` needs no shapes: check each given one against its stream, without a default from q.
        shape = latent_shape_q if latent_shape_k is None and sparse_type != ADA_BSA else latent_shape_k
        k_layout = _layout("k", k, method, shape, txt_len, block_size)
    density = None
    if method.is_dense:
        out = attention_forward(q, k, v, attn_mask, scale, is_causal=is_causal, enable_gqa=True)
    else:
        q, factor = with_positive_scale(q, scale)
        if not q_layout.keeps_order:
            q, k, v = q_layout.permute(q), k_layout.permute(k), k_layout.permute(v)
        mask = method.mask(q, k, q_layout, k_layout, factor)
        lists = lists_of(mask, q_layout, k_layout, q.shape[0], is_causal)
        out = attend(q, k, v, lists, q_layout, k_layout, factor, is_causal, by)
        density = masks.density(mask, q_layout, k_layout, is_causal) if return_density else None
        if not q_layout.keeps_order:
            out = q_layout.unpermute(out)
    out = out.transpose(1, 2) if heads_first else out
    if not return_density:
        return out
    return out, torch.ones((), dtype=torch.float64, device=q.device) if density is None else density


def _layout(
    name: str,
    stream: torch.Tensor,
    method: Method,
    latent_shape: tuple[int, int, int] | None,
    txt_len: int,
    block_size: int,
) -> SparseLayout:
    """Return the layout of a stream [B, S, N, D]; raise if the latent's shape does not match its tokens."""
    tokens, is_estimated = stream.shape[1], method.sparse_type == ADA_BSA
    if tokens == 0:
        raise ArgumentError(f"{name} has no tokens, of which a block could be made: {tuple(stream.shape)}")
    if latent_shape is None and not is_estimated:
        raise ArgumentTypeError(f"sparse_type {method.sparse_type!r} needs latent_shape_q=(frames, height, width)")
    layout = SparseLayout((1, 1, 1) if latent_shape is None else latent_shape, txt_len, block_size, tile=method.tile)
    if latent_shape is not None and layout.tokens != tokens:
        raise ArgumentError(
            f"{name} has {tokens} tokens; txt_len={txt_len} and latent_shape_{name}={tuple(latent_shape)} make "
            f"{layout.tokens}"
        )
    if not is_estimated:
        return layout
    if block_size % masks.STRIDE:
        raise ArgumentError(f"'ada_bsa' takes blocks of a multiple of {masks.STRIDE} tokens, got {block_size}")
    return SparseLayout.plain(tokens, block_size)
