"""`attention_forward`: check the arguments and compute with the fastest candidate."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import checks
from tritium.layers.attention.choice import RUNTIME, check_choice, choose, choose_again, chosen_before, identity
from tritium.layers.attention.mathematics import attention_math, with_positive_scale
from tritium.layers.attention.operator import ATTENTION, run
from tritium.layers.attention.request import Request
from tritium.layers.autocast import as_autocast_has_it


@as_autocast_has_it
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
    opt_mode: str = RUNTIME,
    op_type: str | None = None,
    layout: str | None = None,
) -> torch.Tensor:
    """Compute attention by the fastest candidate for these shapes on this device.

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
        op_type: With `manual`, the candidate: `sdpa`, `cudnn`, `flash`, `efficient`, `math`, `chunked`, `products`,
            `flex`, `flash3`, `sage`, or a name that an installed package adds. Raises if it cannot compute this request.
        layout: With `manual`, the memory layout that tensors are converted to: `BNSD`, `BSND` or `BSH`; None for no change.
    """
    words = (fused, head_first, is_causal, enable_gqa, opt_mode)
    call = _as_call((query, key, value), (attn_mask, layout), scale, words, op_type)
    candidate = None if call is None else chosen_before(call)
    if candidate is None:
        _check(query, key, value, head_first, enable_gqa)
        checks.tensor("attn_mask", attn_mask, optional=True)
        checks.number("scale", scale, optional=True)
        checks.boolean("fused", fused)
        checks.boolean("is_causal", is_causal)
        check_choice(opt_mode, op_type, layout)
    if not head_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if call is not None and candidate is None:
        request = Request.of(query, key, value, None, is_causal)
        candidate = choose_again(call, lambda: choose(request, opt_mode, op_type, None, query.device))
    factor = (query.shape[-1] or 1) ** -0.5 if scale is None else float(scale)
    query, factor = with_positive_scale(query, factor)
    if candidate is not None:
        out = run(candidate, query, key, value, None, factor, is_causal)
        return out if head_first else out.transpose(1, 2)
    mask = _mask_of_rank_4(attn_mask, query, key)
    if mask is not None and is_causal:
        mask, is_causal = _also_causal(mask, query.shape[2], key.shape[2]), False
    if fused and not checks.needs_tangents():
        known = identity() if torch.compiler.is_compiling() else ""
        out = ATTENTION(query, key, value, mask, factor, is_causal, opt_mode, op_type, layout, known)
    else:
        out = attention_math(query, key, value, mask, factor, is_causal)
    return out if head_first else out.transpose(1, 2)


def _as_call(
    tensors: tuple[torch.Tensor, ...],
    absent: tuple[object, object],
    scale: float | None,
    words: tuple[bool | str, ...],
    op_type: str | None,
) -> Hashable | None:
    """Return a key with which one look-up replaces both checks and choice, or None if they must run.

    For small attentions the host time of checks and choice exceeds the kernel's. Calls that are traced, differentiated,
    masked or converted to another layout return None, as do arguments of unexpected types.
    """
    if torch.compiler.is_dynamo_compiling() or compat.dynamo.is_transformed():
        return None
    if absent[0] is not None or absent[1] is not None:
        return None
    if scale is not None and type(scale) is not float:
        return None
    if op_type is not None and type(op_type) is not str:
        return None
    if words[0] is not True or tuple(map(type, words)) != (bool, bool, bool, bool, str):
        return None
    grad = torch.is_grad_enabled()
    known = []
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or (grad and tensor.requires_grad):
            return None
        known.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    return (*known, words, op_type)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_first: bool, enable_gqa: bool) -> None:
    checks.boolean("head_first", head_first)
    checks.boolean("enable_gqa", enable_gqa)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, tensor)
        checks.rank(name, tensor, 4)
    checks.together(query=query, key=key, value=value)
    if not query.dtype == key.dtype == value.dtype or query.dtype not in checks.FLOATING:
        raise ArgumentTypeError(
            f"query, key and value must have one floating-point dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    tokens, heads = (2, 1) if head_first else (1, 2)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, head_first={head_first}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ArgumentError(f"query, key and value must have one batch: {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(f"query and key must have heads of one width: {shapes}")
    if key.shape[tokens] != value.shape[tokens] or key.shape[heads] != value.shape[heads]:
        raise ArgumentError(f"key and value must have the same tokens and heads: {shapes}")
    if enable_gqa:
        if key.shape[heads] == 0 or query.shape[heads] % key.shape[heads]:
            raise ArgumentError(f"the query's heads must be a multiple of the key's: {shapes}")
    elif query.shape[heads] != key.shape[heads]:
        raise ArgumentError(f"query and key must have as many heads, unless enable_gqa=True: {shapes}")


def _mask_of_rank_4(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype != torch.bool and mask.dtype not in checks.FLOATING:
        raise ArgumentTypeError(
            f"attn_mask must be boolean, where True keeps, or floating point to be added; got {mask.dtype}"
        )
    checks.rank("attn_mask", mask, 2, 3, 4)
    checks.together(query=query, attn_mask=mask)
    checks.broadcastable("attn_mask", mask, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
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
