"""Attention over split streams: from a call with tagged tensors to the exchange that computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from tritium.techniques.parallel import exchange_attention
from tritium.techniques.parallel.exchange import Grid, Segments, join
from tritium.techniques.parallel.streams import Operation, Tag, Tokens, Uniform

# A sparse attention over the tokens of a layout, in eager calls.
_SPARSE = "counted_attention"

# Functions of Tritium that a graph or an eager call may contain instead of PyTorch's.
_OWN = ("choose_attention", "attention", _SPARSE)
NAMES = ("scaled_dot_product_attention", *_OWN)


@dataclass(frozen=True)
class Attention:
    """The arguments of one attention; `attend` computes it as the model did."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    is_causal: bool
    attend: exchange_attention.Attend


def attention_of(target: Callable[..., Any], operation: Operation) -> Attention:
    """Return the arguments of a call of one of `NAMES`."""
    if operation.name in _OWN:
        q, k, v, mask, scale, causal, *rest = operation.args
        kwargs = operation.kwargs

        def own(q: Any, k: Any, v: Any, mask: Any, is_causal: bool) -> torch.Tensor:
            return target(q, k, v, mask, scale, is_causal, *rest, **kwargs)  # type: ignore[no-any-return]

        return Attention(q, k, v, mask, scale, causal, own)
    q, k, v = (operation.argument(place, name) for place, name in enumerate(("query", "key", "value")))
    mask, dropout, causal = (
        operation.argument(place, name, default)
        for place, name, default in ((3, "attn_mask", None), (4, "dropout_p", 0.0), (5, "is_causal", False))
    )
    scale, grouped = operation.kwargs.get("scale"), operation.kwargs.get("enable_gqa", False)
    if dropout:
        raise operation.mixed("has dropout, which ranks draw alone")

    def attend(q: Any, k: Any, v: Any, mask: Any, is_causal: bool) -> torch.Tensor:
        options = {"enable_gqa": True} if grouped else {}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, **options)

    return Attention(q, k, v, mask, scale, causal, attend)


def is_split(operation: Operation) -> bool:
    """Return True if an attention has split queries or keys, or a mask of split tokens."""
    return any(tag is not None and tag.is_split for tag in map(operation.tokens, operation.tensors))


def tag_of_result(operation: Operation, attention: Attention) -> Tag:
    segments = _segments(operation, attention.q)
    return None if segments is None else Tokens(attention.q.dim() - 2, segments)


def exchanged(operation: Operation, attention: Attention, grid: Grid, provider: str) -> torch.Tensor:
    """Compute an attention over the tokens of all ranks."""
    queries, keys, values = (_segments(operation, x) for x in (attention.q, attention.k, attention.v))
    if keys != values:
        raise operation.mixed("has keys and values of different tokens")
    if attention.q.dim() != 4:
        raise operation.mixed("has no dim of heads")
    if operation.name == _SPARSE and (grid.ulysses.size < grid.size or provider not in ("packed", "split")):
        raise operation.mixed(
            "is sparse: it needs all tokens of a rank's heads at once, so ulysses alone, in no chunks"
        )
    mask = attention.mask
    if mask is not None:
        mask = _whole_mask(operation, mask, keys, grid)
    call = exchange_attention.Call(attention.attend, queries, keys, attention.scale, attention.is_causal)
    return exchange_attention.attention(attention.q, attention.k, attention.v, mask, call, grid, provider)


def _segments(operation: Operation, x: torch.Tensor) -> Segments | None:
    """Return the segments of q, k or v, or None if it is whole."""
    tag = operation.tokens(x)
    if tag is None or not tag.is_split:
        return None
    if tag.dim != x.dim() - 2 or tag.outer * tag.inner > 1 or any(segment.is_uniform for segment in tag.segments):
        raise operation.mixed(f"has tokens in dim {tag.dim}")
    return tag.segments


def _whole_mask(operation: Operation, mask: torch.Tensor, keys: Segments | None, grid: Grid) -> torch.Tensor:
    """Return a mask for the queries and keys of all ranks."""
    tag = operation.tag_of(mask)
    if isinstance(tag, Uniform):
        # All values are equal, so one is enough.
        return mask[..., :1, :1]
    if not isinstance(tag, Tokens):
        return mask
    if any(segment.is_uniform for segment in tag.segments):
        return _filled(operation, mask, tag, keys, grid)
    return join(mask, tag.dim, tag.segments, grid) if tag.is_split else mask


def _filled(operation: Operation, mask: torch.Tensor, tag: Tokens, keys: Segments | None, grid: Grid) -> torch.Tensor:
    """Return a mask over whole keys, in which parts of equal values are longer."""
    if keys is None or len(keys) != len(tag.segments) or tag.dim != mask.dim() - 1:
        raise operation.mixed("has a mask of other tokens")
    found, start = [], 0
    for own, segment in zip(tag.segments, keys, strict=True):
        share = own.share(grid.size)
        piece = mask.narrow(tag.dim, start, share)
        if own.is_uniform and share == segment.share(grid.size):
            found.append(piece.narrow(tag.dim, 0, 1).repeat_interleave(segment.length, dim=tag.dim))
        elif own.is_split and own == segment:
            found.append(join(piece, tag.dim, (own,), grid))
        elif not own.is_split and share == segment.length:
            found.append(piece)
        else:
            raise operation.mixed("has a mask of other tokens")
        start += share
    return torch.cat(found, tag.dim)
