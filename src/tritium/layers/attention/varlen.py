"""Attention over segments of one stream of tokens, with the signature of flash-attn's varlen function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tritium import compat, device
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import check_rank, checked, refuse_gradients_in_a_graph
from tritium.layers.attention.forward import with_positive_scale
from tritium.layers.autocast import under_autocast
from tritium.ops.attention import attention_math

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

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
    _refuse_unsupported(
        dropout_p=(dropout_p, 0),
        window_size=(window_size, (-1, -1)),
        softcap=(softcap, 0),
        alibi_slopes=(alibi_slopes, None),
        return_attn_probs=(return_attn_probs, False),
        block_table=(block_table, None),
    )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, 3)
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[:2] != v.shape[:2]:
        raise ArgumentError(f"k and v must have the same tokens and heads: {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(f"q must have heads as wide as k's, and a multiple of as many: {shapes}")
    refuse_gradients_in_a_graph("attention_forward_varlen", q, k, v)
    cu_q = _boundaries("cu_seqlens_q", cu_seqlens_q, q, max_seqlen_q)
    cu_k = _boundaries("cu_seqlens_k", cu_seqlens_k, k, max_seqlen_k)
    if cu_q.shape != cu_k.shape:
        raise ArgumentError(
            f"cu_seqlens_q and cu_seqlens_k must be of as many segments, got {cu_q.shape[0] - 1} and {cu_k.shape[0] - 1}"
        )
    q, scale = with_positive_scale(q, (q.shape[-1] or 1) ** -0.5 if softmax_scale is None else float(softmax_scale))
    arguments = (q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale, causal)
    if compat.dynamo.needs_gradients(q, k, v):
        # Bypass the operator: it has no autograd formula, and autograd would warn about that.
        return _varlen(*arguments)  # type: ignore[no-any-return]
    return torch.ops.tritium.varlen_attention.default(*arguments)  # type: ignore[no-any-return]


def _refuse_unsupported(**given: tuple[Any, Any]) -> None:
    """Raise for parameters of flash-attn's function with a value other than None and the one without an effect."""
    wrong = [
        f"{name}={value!r}"
        for name, (value, accepted) in given.items()
        if value is not None
        and (isinstance(value, torch.Tensor) or (tuple(value) if isinstance(value, list) else value) != accepted)
    ]
    if wrong:
        raise ArgumentError(f"attention over segments does not support {', '.join(wrong)}; leave them out")


def _boundaries(
    name: str, given: torch.Tensor | Sequence[int], stream: torch.Tensor, longest: int | None
) -> torch.Tensor:
    """Return boundaries on the stream's device; check those that can be read without waiting."""
    if not isinstance(given, torch.Tensor):
        _check_boundaries(name, list(given), stream.shape[0], longest)
        return torch.tensor(given, dtype=torch.int32, device=stream.device)
    if given.dim() != 1 or given.shape[0] < 2 or given.dtype not in INTEGERS:
        raise ArgumentError(
            f"{name} must hold integers in one dim, two or more, got {given.dtype} of {tuple(given.shape)}"
        )
    if given.is_cpu and stream.is_cuda and not compat.dynamo.is_compiling():
        _check_boundaries(name, given.tolist(), stream.shape[0], longest)
    return given.to(stream.device)


def _check_boundaries(name: str, places: list[int], tokens: int, longest: int | None = None) -> None:
    # Compare pairs: symbolic integers cannot be sorted.
    falls = any(later < earlier for earlier, later in itertools.pairwise(places))
    if len(places) < 2 or places[0] != 0 or places[-1] != tokens or falls:
        raise ArgumentError(
            f"{name} must begin with 0, not decrease, and end with the number of tokens, {tokens}; got {places[:8]}"
            f"{'...' if len(places) > 8 else ''}"
        )
    if longest is not None and any(later - earlier > longest for earlier, later in itertools.pairwise(places)):
        raise ArgumentError(f"a segment of {name} is longer than max_seqlen_{name[-1]}={longest}: {places[:8]}")


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
    if compat.dynamo.is_transformed() or not _is_readable(q, k, v):
        return by_segment(q, k, v, cu_q, cu_k, scale, causal, max_q, max_k)
    places = cu_q.to(torch.int32).contiguous(), cu_k.to(torch.int32).contiguous()
    if _flash_takes(q, v):
        longest = max_q, max_k
        if max_q is None or max_k is None:
            # Reading the lengths synchronizes anyway, so check the boundaries too.
            longest = max(_lengths("cu_seqlens_q", cu_q, q)), max(_lengths("cu_seqlens_k", cu_k, k))
        out = compat_attention.varlen_attention(q, k, v, *places, longest, scale, causal)  # type: ignore[arg-type]
        if out is not None:
            return out.contiguous()
    if _nested_takes(q, k, v):
        queries, keys = _lengths("cu_seqlens_q", cu_q, q, max_q), _lengths("cu_seqlens_k", cu_k, k, max_k)
        # The kernel does not write rows that see no key.
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


def _flash_takes(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether torch's varlen attention, which is FlashAttention, has a kernel for such heads."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] == v.shape[2] <= 256


def _nested_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the kernel of nested tensors applies.

    It covers float32, and heads for which FlashAttention has no kernel.
    """
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and not compat.dynamo.needs_gradients(q, k, v)


def _all_see_a_key(queries: list[int], keys: list[int], causal: bool) -> bool:
    """Return whether every query of segments of these lengths sees a key."""
    pairs = zip(queries, keys, strict=True)
    return all(own == 0 or (own <= other if causal else other > 0) for own, other in pairs)


def _lengths(name: str, places: torch.Tensor, stream: torch.Tensor, longest: int | None = None) -> list[int]:
    """Return the length of every segment; this synchronizes with the device."""
    listed = places.tolist()
    _check_boundaries(name, listed, stream.shape[0], longest)
    return [end - start for start, end in itertools.pairwise(listed)]


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
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    _check_boundaries("cu_seqlens_q", ends_q, q.shape[0], max_q)
    _check_boundaries("cu_seqlens_k", ends_k, k.shape[0], max_k)
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    for first, last, key_first, key_last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if first == last or key_first == key_last:
            continue
        own_q, own_k, own_v = (
            tensor[start:end].transpose(0, 1).unsqueeze(0)
            for tensor, start, end in ((q, first, last), (k, key_first, key_last), (v, key_first, key_last))
        )
        out[first:last] = _segment(own_q, own_k, own_v, scale, causal).squeeze(0).transpose(0, 1)
    return out


def _segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    if (not causal or q.shape[2] == k.shape[2]) and not compat.dynamo.has_tangents():
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    queries, keys = q.shape[2], k.shape[2]
    rows = torch.arange(queries, device=q.device).unsqueeze(1) + (keys - queries)
    seen = torch.arange(keys, device=q.device) <= rows
    return attention_math(q, k, v, seen[None, None] if causal else None, scale, causal=False)


def _fake(
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
    del k, cu_q, cu_k, max_q, max_k, scale, causal
    return q.new_empty((*q.shape[:2], v.shape[2]))


_LIBRARY.impl("varlen_attention", _varlen, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::varlen_attention", _fake, lib=_LIBRARY)
