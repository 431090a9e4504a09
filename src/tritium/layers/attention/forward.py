"""`attention_forward`: attention by the fastest provider."""

from __future__ import annotations

import math
from typing import Literal

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import FLOATING, check_broadcast, check_rank, checked, under_autocast
from tritium.layers.choose import DENSE, check_name, compute
from tritium.ops.attention import attention_math

Mode = Literal["runtime", "static", "manual", "lossy"]
# The memory formats that inputs can be converted to. BSH, with merged heads, has the same bytes as BSND.
Layout = Literal["BNSD", "BSND", "BSH"]


@checked
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
            `lossy` is `runtime` with lossy providers where they are at least 3 % faster, or with `op_type` for the calls
            that it can compute.
        op_type: With `manual`, the provider: `sdpa`, `cudnn`, `flash`, `efficient`, `math`, `chunked`, `products`,
            `flex`, `flash3`, the lossy `int8` and `sage`, or a name that an installed package adds.
            Raises if it cannot compute this call.
        layout: With `manual`, the memory format that tensors are converted to: `BNSD`, `BSND` or `BSH`; None for no change.
    """
    check_choice(opt_mode, op_type, layout)
    streams = {"query": query, "key": key, "value": value}
    check_streams(streams, heads=1 if head_first else 2, grouped=enable_gqa)
    if not head_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if layout is not None:
        query, key, value = (_laid_out(tensor, layout) for tensor in (query, key, value))
    query, factor = with_positive_scale(query, scale)
    mask = _mask_of_rank_4(attn_mask, query, key)
    if mask is not None and is_causal:
        mask, is_causal = _also_causal(mask, query.shape[2], key.shape[2]), False
    # PyTorch's kernels compute no forward-mode derivatives.
    if fused and (torch.compiler.is_compiling() or not compat.dynamo.has_tangents()):
        by = opt_mode if op_type is None else f"{opt_mode}:{op_type}"
        by = (op_type or "sdpa") if opt_mode == "manual" else by
        out = compute(DENSE, by, query, key, value, mask, factor, is_causal)
    else:
        out = attention_math(query, key, value, mask, factor, is_causal)
    return out if head_first else out.transpose(1, 2)


def check_choice(opt_mode: str, op_type: str | None, layout: str | None) -> None:
    """Raise for names that are invalid for every call."""
    if opt_mode != "manual" and ((op_type is not None and opt_mode != "lossy") or layout is not None):
        raise ArgumentError(
            f"op_type and layout are for opt_mode 'manual', not for {opt_mode!r}, which chooses by itself"
        )
    check_name(DENSE, op_type)


def check_streams(streams: dict[str, torch.Tensor], rank: int = 4, *, heads: int = 2, grouped: bool = True) -> None:
    """Raise unless attention is defined for q, k and v of this rank, with heads along the dim `heads`."""
    for name, tensor in streams.items():
        check_rank(name, tensor, rank)
    q, k, v = streams.values()
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(f"{', '.join(streams)} must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    wanted = None
    if q.shape[: rank - 3] != k.shape[: rank - 3] or k.shape[:-1] != v.shape[:-1]:
        wanted = "one batch, and the last two the same tokens and heads"
    elif q.shape[-1] != k.shape[-1]:
        wanted = "heads of one width in the first two"
    elif not grouped and q.shape[heads] != k.shape[heads]:
        wanted = "as many heads, unless enable_gqa=True"
    elif q.shape[heads] != k.shape[heads] and (k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]):
        wanted = "in the first a multiple of the heads of the others"
    if wanted is not None:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise ArgumentError(f"{', '.join(streams)} must have {wanted}: {shapes}")


def with_positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float]:
    """Return a query and a scale above 0 for the same attention; None is D ** -0.5.

    Kernels take the largest score before they scale it, and mask keys with -inf: both need a positive scale.
    """
    scale = (q.shape[-1] or 1) ** -0.5 if scale is None else float(scale)
    if scale > 0:
        return q, scale
    if scale < 0:
        return -q, -scale
    if scale == 0:
        return q * 0, 1.0
    raise ArgumentError(f"scale must be a number, got {scale}")


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a heads-first tensor in a memory format, copied if necessary."""
    return tensor.contiguous() if layout == "BNSD" else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _mask_of_rank_4(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a boolean mask, or an additive one in the dtype of the query or of the scores."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise ArgumentTypeError(
            f"attn_mask must be boolean, where True keeps, or floating point to be added; got {mask.dtype}"
        )
    check_rank("attn_mask", mask, 2, 3, 4)
    check_broadcast("attn_mask", mask, (*query.shape[:3], key.shape[2]))
    mask = mask[(None,) * (4 - mask.dim())]
    # Kernels need a value for every key, contiguous along keys.
    mask = mask.expand(*mask.shape[:3], key.shape[2])
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    if mask.dtype in (torch.bool, query.dtype):
        return mask
    wide = torch.promote_types(query.dtype, torch.float32)
    if mask.dtype == torch.float64:
        # Keep finite values finite: minus infinity hides a key, the lowest finite number does not.
        limits = torch.finfo(wide)
        mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))
    return mask.to(wide)


def _also_causal(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Return a mask that also hides keys behind the query."""
    rows = torch.arange(queries, device=mask.device).unsqueeze(1)
    seen = torch.arange(keys, device=mask.device) <= rows
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
