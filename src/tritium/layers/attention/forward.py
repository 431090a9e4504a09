"""`attention_forward`: attention by the fastest provider."""

from __future__ import annotations

import math

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import FLOATING, check_broadcast, check_rank, checked
from tritium.layers.attention.choose import Layout, Mode, attend, check_choice
from tritium.layers.autocast import under_autocast
from tritium.ops.attention import attention_math


@checked(any_dtype=("attn_mask",))
@under_autocast
def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    fused: bool = True,
    head_first: bool = False,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
    opt_mode: Mode = "runtime",
    op_type: str | None = None,
    layout: Layout | None = None,
) -> torch.Tensor:
    """Compute attention by the fastest provider for these shapes on this device.

    Masks, scales and causality are always applied.

    Args:
        query: [B, Sq, N, D], or [B, N, Sq, D] with `head_first`; the result has the same layout.
        key: [B, Sk, N, D] or heads first; fewer heads with `enable_gqa`.
        value: As key; its heads may have another width.
        attn_mask: Boolean, where True keeps a score, or floating point and added to the scores; of rank 2 to 4, broadcast
            to [B, N, Sq, Sk] as in F.scaled_dot_product_attention.
        scale: Factor of the scores; D ** -0.5 if None.
        fused: False computes the definition in float32, with all scores in memory.
        head_first: Whether heads come before tokens.
        is_causal: Whether query i sees only keys 0 to i; can be combined with a mask.
        enable_gqa: Whether groups of heads of the query may share a head of the key.
        opt_mode: `runtime` measures once and remembers, `static` uses a shipped table or a rule, `manual` uses `op_type`.
        op_type: With `manual`, the provider: `sdpa`, `cudnn`, `flash`, `efficient`, `math`, `chunked`, `products`,
            `flex`, `flash3`, `sage`, or a name that an installed package adds. Raises if it cannot compute this call.
        layout: With `manual`, the memory format that tensors are converted to: `BNSD`, `BSND` or `BSH`; None for no change.
    """
    check_choice(opt_mode, op_type, layout)
    check_streams(("query", "key", "value"), query, key, value, heads_first=head_first, grouped=enable_gqa)
    if not head_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    query, factor = with_positive_scale(query, (query.shape[-1] or 1) ** -0.5 if scale is None else float(scale))
    mask = _mask_of_rank_4(attn_mask, query, key)
    if mask is not None and is_causal:
        mask, is_causal = _also_causal(mask, query.shape[2], key.shape[2]), False
    # PyTorch's kernels compute no forward-mode derivatives.
    if fused and (torch.compiler.is_compiling() or not compat.dynamo.has_tangents()):
        out = attend(query, key, value, mask, factor, is_causal, opt_mode, op_type, layout)
    else:
        out = attention_math(query, key, value, mask, factor, is_causal)
    return out if head_first else out.transpose(1, 2)


def check_streams(
    names: tuple[str, str, str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads_first: bool,
    grouped: bool = True,
) -> None:
    """Raise unless attention is defined for q, k and v, of rank 4."""
    listed = f"{names[0]}, {names[1]} and {names[2]}"
    for name, tensor in zip(names, (q, k, v), strict=True):
        check_rank(name, tensor, 4)
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(f"{listed} must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    heads = 1 if heads_first else 2
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, {'heads' if heads_first else 'tokens'} first"
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ArgumentError(
            f"{listed} must have one batch, and {names[1]} and {names[2]} the same tokens and heads: {shapes}"
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"{names[0]} and {names[1]} must have heads of one width: {shapes}")
    if not grouped and q.shape[heads] != k.shape[heads]:
        raise ArgumentError(f"{names[0]} and {names[1]} must have as many heads, unless enable_gqa=True: {shapes}")
    if q.shape[heads] != k.shape[heads] and (k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]):
        raise ArgumentError(f"the heads of {names[0]} must be a multiple of those of {names[1]}: {shapes}")


def with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return a query and a scale above 0 for the same attention.

    Kernels take the largest score before they scale it, and mask keys with -inf: both need a positive scale.
    """
    if scale > 0:
        return q, scale
    if scale < 0:
        return -q, -scale
    if scale == 0:
        return q * 0, 1.0
    raise ArgumentError(f"scale must be a number, got {scale}")


def _mask_of_rank_4(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise ArgumentTypeError(
            f"attn_mask must be boolean, where True keeps, or floating point to be added; got {mask.dtype}"
        )
    check_rank("attn_mask", mask, 2, 3, 4)
    check_broadcast("attn_mask", mask, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    # Kernels need a value for every key, contiguous along keys.
    mask = mask.expand(*mask.shape[:3], key.shape[2])
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask if mask.dtype == torch.bool else _added(mask, query.dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask in the dtype of the scores, or unchanged if it has the query's dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    if mask.dtype == torch.float64 != wide:
        # Keep finite values finite: minus infinity hides a key, the lowest finite number does not.
        limits = torch.finfo(wide)
        mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))
    return mask if mask.dtype == dtype else mask.to(wide)


def _also_causal(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Return a mask that also hides keys behind the query."""
    rows = torch.arange(queries, device=mask.device).unsqueeze(1)
    seen = torch.arange(keys, device=mask.device) <= rows
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
