"""Attention over segments of one stream of tokens, with the signature of flash-attn's varlen function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tritium import compat, device
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError
from tritium.layers.arguments import checked, refuse_gradients_in_a_graph, under_autocast
from tritium.layers.attention.forward import check_streams, with_positive_scale
from tritium.ops.attention import attention_math

# Segments are one dim of the launch grid; CUDA limits it to this.
MOST_NESTED = 65_535

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int? max_q, int? max_k, float scale, "
    "bool causal) -> Tensor"
)


@checked
@under_autocast
def attention_forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | Sequence[int],
    cu_seqlens_k: torch.Tensor | Sequence[int],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    deterministic: Any = None,
    return_attn_probs: Any = None,
    block_table: Any = None,
) -> torch.Tensor:
    """Compute attention of each segment of queries to its segment of keys; returns [T, N, D].

    Args:
        q: [T, N, D]: the queries of all segments, concatenated.
        k: [T', N', D]; N' divides N.
        v: As k.
        cu_seqlens_q: The start of each segment and the end of the last: [0, 3, 3, 8] are segments of 3, 0 and 5.
        cu_seqlens_k: The same for the keys, with as many segments.
        max_seqlen_q: The longest segment or more; passing both avoids a GPU synchronization in half precision.
        max_seqlen_k: The same for the keys.
        dropout_p: Only 0: no dropout.
        softmax_scale: D ** -0.5 if None.
        causal: Whether the last query of a segment sees all of its keys, the one before it all but one, and so on.
            The result of a query that sees no key is zero.
        window_size: Only (-1, -1): no window.
        softcap: Only 0: no cap.
        alibi_slopes: Not supported.
        deterministic: No effect: a forward pass is always deterministic.
        return_attn_probs: Not supported.
        block_table: Not supported.
    """
    del deterministic
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    _check_without_effect("dropout_p", dropout_p, 0)
    _check_without_effect("window_size", window, (-1, -1))
    _check_without_effect("softcap", softcap, 0)
    _check_without_effect("alibi_slopes", alibi_slopes, None)
    _check_without_effect("return_attn_probs", return_attn_probs, False)
    _check_without_effect("block_table", block_table, None)
    check_streams({"q": q, "k": k, "v": v}, rank=3, heads=1)
    refuse_gradients_in_a_graph("attention_forward_varlen", q, k, v)
    cu_q = _boundaries("cu_seqlens_q", cu_seqlens_q, q, max_seqlen_q)
    cu_k = _boundaries("cu_seqlens_k", cu_seqlens_k, k, max_seqlen_k)
    if cu_q.shape != cu_k.shape:
        segments = f"{cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        raise ArgumentError(f"cu_seqlens_q and cu_seqlens_k must be of as many segments, got {segments}")
    q, scale = with_positive_scale(q, softmax_scale)
    arguments = (q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale, causal)
    if compat.dynamo.needs_gradients(q, k, v):
        # Bypass the operator: it has no autograd formula, and autograd would warn about that.
        return _varlen(*arguments)  # type: ignore[no-any-return]
    return torch.ops.tritium.varlen_attention.default(*arguments)  # type: ignore[no-any-return]


def _check_without_effect(name: str, value: Any, without_effect: Any) -> None:
    """Raise for a parameter of flash-attn's function that would change the result."""
    if value is not None and (isinstance(value, torch.Tensor) or value != without_effect):
        raise ArgumentError(f"attention over segments does not support {name}={value!r}; leave it out")


def _boundaries(
    name: str, given: torch.Tensor | Sequence[int], stream: torch.Tensor, longest: int | None
) -> torch.Tensor:
    """Return boundaries on the stream's device; check those that can be read without waiting."""
    if not isinstance(given, torch.Tensor):
        _check_boundaries(name, list(given), stream.shape[0], longest)
        return torch.tensor(given, dtype=torch.int32, device=stream.device)
    if given.dim() != 1 or given.shape[0] < 2 or given.is_floating_point():
        raise ArgumentError(
            f"{name} must hold 2 integers or more in one dim, got {given.dtype} of {tuple(given.shape)}"
        )
    if given.is_cpu and stream.is_cuda and not compat.dynamo.is_compiling():
        _check_boundaries(name, given.tolist(), stream.shape[0], longest)
    return given.to(stream.device)


def _check_boundaries(name: str, places: list[int], tokens: int, longest: int | None = None) -> list[int]:
    """Return the length of every segment; raise for wrong boundaries."""
    # Compare pairs: symbolic integers cannot be sorted.
    lengths = [later - earlier for earlier, later in itertools.pairwise(places)]
    shown = f"{places[:8]}{'...' if len(places) > 8 else ''}"
    if not lengths or places[0] != 0 or places[-1] != tokens or any(length < 0 for length in lengths):
        raise ArgumentError(
            f"{name} must begin with 0, not decrease, and end with the number of tokens, {tokens}; got {shown}"
        )
    if longest is not None and any(length > longest for length in lengths):
        raise ArgumentError(f"a segment of {name} is longer than max_seqlen_{name[-1]}={longest}: {shown}")
    return lengths


# Untraced: it reads the lengths of segments, which a graph cannot do.
@compat.dynamo.untraced
def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None,
    max_k: int | None,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    # The kernels' operators have no rules for vmap, grad and jvp.
    if not compat.dynamo.is_transformed() and _is_readable(q, k, v):
        places = cu_q.to(torch.int32).contiguous(), cu_k.to(torch.int32).contiguous()
        # FlashAttention has kernels for half precision and heads of one width up to 256.
        if q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] == v.shape[2] <= 256:
            longest = max_q, max_k
            if max_q is None or max_k is None:
                # Reading the lengths synchronizes anyway, so check the boundaries too.
                longest = max(_lengths("cu_seqlens_q", cu_q, q)), max(_lengths("cu_seqlens_k", cu_k, k))
            out = compat_attention.varlen_attention(q, k, v, *places, longest, scale, causal)  # type: ignore[arg-type]
            if out is not None:
                return out.contiguous()
        # The kernel of nested tensors has float32 and other heads, and no backward here.
        if q.dtype != torch.float64 and not compat.dynamo.needs_gradients(q, k, v):
            queries, keys = _lengths("cu_seqlens_q", cu_q, q, max_q), _lengths("cu_seqlens_k", cu_k, k, max_k)
            # It does not write rows that see no key.
            if len(queries) <= MOST_NESTED and _all_see_a_key(queries, keys, causal):
                out = compat_attention.nested_attention(q, k, v, *places, (max(queries), max(keys)), scale, causal)
                if out is not None:
                    return out.contiguous()
    return by_segment(q, k, v, cu_q, cu_k, scale, causal, max_q, max_k)


def _is_readable(*streams: torch.Tensor) -> bool:
    """Return whether kernels can read streams: Ampere or later, dense heads aligned to 16 bytes."""
    capability = device.capability(streams[0].device)
    if capability is None or capability < (8, 0):
        return False

    def is_aligned(stream: torch.Tensor) -> bool:
        steps = (stream.stride(0), stream.stride(1), stream.shape[2])
        return stream.data_ptr() % 16 == 0 and not any(step * stream.element_size() % 16 for step in steps)

    return all(stream.numel() and stream.stride(2) == 1 and is_aligned(stream) for stream in streams)


def _all_see_a_key(queries: list[int], keys: list[int], causal: bool) -> bool:
    """Return whether every query of segments of these lengths sees a key."""
    pairs = zip(queries, keys, strict=True)
    return all(own == 0 or (own <= other if causal else other > 0) for own, other in pairs)


def _lengths(name: str, places: torch.Tensor, stream: torch.Tensor, longest: int | None = None) -> list[int]:
    """Return the length of every segment; this synchronizes with the device."""
    return _check_boundaries(name, places.tolist(), stream.shape[0], longest)


def by_segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    scale: float,
    causal: bool,
    max_q: int | None = None,
    max_k: int | None = None,
) -> torch.Tensor:
    """Compute one segment after the other with PyTorch's attention."""
    queries, keys = _lengths("cu_seqlens_q", cu_q, q, max_q), _lengths("cu_seqlens_k", cu_k, k, max_k)
    segments = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([_segment(*streams, scale, causal) for streams in segments])


def _segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    queries, keys = q.shape[0], k.shape[0]
    if queries == 0 or keys == 0:
        return q.new_zeros((*q.shape[:2], v.shape[2]))
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    if (not causal or queries == keys) and not compat.dynamo.has_tangents():
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        rows = torch.arange(queries, device=q.device).unsqueeze(1) + (keys - queries)
        seen = torch.arange(keys, device=q.device) <= rows
        out = attention_math(q, k, v, seen[None, None] if causal else None, scale, causal=False)
    return out.squeeze(0).transpose(0, 1)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    del k
    return q.new_empty((*q.shape[:2], v.shape[2]))


_LIBRARY.impl("varlen_attention", _varlen, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::varlen_attention", _fake, lib=_LIBRARY)
