"""`attention_forward`: what is asked is checked, and honoured by whoever is fastest at it."""

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
    """Attention by whatever is fastest for these shapes on this device. Masks, scales and causality are always honoured.

    Args:
        query: [B, Sq, N, D], or [B, N, Sq, D] with `head_first`; the result has the same layout.
        key: [B, Sk, N, D] or heads first; fewer heads with `enable_gqa`.
        value: As key; its heads may have another width.
        attn_mask: Boolean, where True keeps a score, or added to the scores; of rank 2 to 4, broadcast to
            [B, N, Sq, Sk] as F.scaled_dot_product_attention does it.
        scale: What scores are multiplied with; D ** -0.5 if None.
        fused: False computes it as it is defined, in float32, whatever that takes.
        head_first: Whether heads come before tokens.
        is_causal: Whether query i sees keys up to i only; a mask is honoured besides.
        enable_gqa: Whether groups of heads of the query may share a head of the key.
        opt_mode: `runtime` measures once and remembers, `static` takes a shipped table or a rule, `manual` takes `op_type`.
        op_type: With `manual`, who computes: `sdpa`, `cudnn`, `flash`, `efficient`, `math`, `chunked`, `products`,
            `flex`, `flash3`, `sage`, or a name that an installed package adds. One that cannot do what is asked is an error.
        layout: With `manual`, how the tensors lie in memory: `BNSD`, `BSND` or `BSH`; as they are if None.
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
    """All that is checked and chosen by, where one look-up can stand for both; None where it cannot.

    For a small attention the host has no more time than that. What is traced, differentiated, masked or laid out anew takes
    the long way, and so does what is of a type that is not expected here.
    """
    if torch.compiler.is_dynamo_compiling() or compat.is_transformed():
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
    # Kernels ask for a number of every key, side by side.
    mask = mask.expand(*mask.shape[:3], key.shape[2])
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask if mask.dtype == torch.bool else _added(mask, query.dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask in the dtype of the scores it is added to, or in that of the query, if it is."""
    wide = torch.promote_types(dtype, torch.float32)
    if mask.dtype == torch.float64 != wide:
        # What is finite stays so: minus infinity hides a key, and the least number does not.
        limits = torch.finfo(wide)
        mask = torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max))
    return mask if mask.dtype == dtype else mask.to(wide)


def _also_causal(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """A mask that also hides keys behind the query."""
    rows = torch.arange(queries, device=mask.device).unsqueeze(1)
    seen = torch.arange(keys, device=mask.device) <= rows
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
