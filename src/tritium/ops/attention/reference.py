"""The reference and samples of `attention`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tritium.ops.op import Sample

# The bytes of scores that `chunked` holds at once.
CHUNK_BYTES = 64 << 20


def attention_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    *,
    first_row: int = 0,
) -> torch.Tensor:
    """Compute attention in float32 (float64 for float64) and round once.

    A row without a visible key gives zeros. `first_row` is the index of the first query if q is a slice of all queries.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q.to(wide) * scale) @ k.to(wide).transpose(-2, -1)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + first_row
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows, -math.inf)
    if mask is None:
        return (torch.softmax(scores, dim=-1) @ v.to(wide)).to(q.dtype)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    # Fill such rows before the softmax too: it would return NaN for them, and their gradients would be NaN.
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), dim=-1).masked_fill(unseen, 0.0)
    return (weights @ v.to(wide)).to(q.dtype)


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """Compute `attention_math` for a few queries at a time, so that memory never holds all scores."""
    batch, heads, queries, _ = q.shape
    rows = max(1, CHUNK_BYTES // max(1, 4 * batch * heads * k.shape[2]))
    done = []
    for start in range(0, max(queries, 1), rows):
        some = slice(start, start + rows)
        part = mask[:, :, some] if mask is not None and mask.shape[2] > 1 else mask
        done.append(attention_math(q[:, :, some], k, v, part, scale, causal, first_row=start))
    return torch.cat(done, dim=2)


def empty_result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Allocate the result for heads-first q and v, with the heads of a token side by side in memory."""
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)


def arranged(out: torch.Tensor) -> torch.Tensor:
    """Return a result with the strides of `empty_result`, copied if it has others."""
    _, heads, queries, width = out.shape
    if out.stride() == (queries * heads * width, width, heads * width, 1) and out.numel():
        return out
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    return arranged(attention_math(q, k, v, mask, scale, causal))


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(53)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(
        queries: int,
        keys: int,
        *,
        width: int = 64,
        value_width: int | None = None,
        heads: int = 2,
        kv_heads: int | None = None,
        batch: int = 1,
        heads_first: bool = False,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> dict[str, Any]:
        def side(tokens: int, heads: int, width: int) -> torch.Tensor:
            if heads_first:
                return random(batch, heads, tokens, width)
            return random(batch, tokens, heads, width).transpose(1, 2)

        kv_heads = kv_heads or heads
        sides = {"q": side(queries, heads, width), "k": side(keys, kv_heads, width)}
        sides["v"] = side(keys, kv_heads, value_width or width)
        return {**sides, "mask": mask, "scale": width**-0.5, "causal": causal}

    def kept(*shape: int) -> torch.Tensor:
        mask = torch.rand(shape, generator=generator, device=device_type) < 0.6
        # Providers differ in the result of a row without a key.
        mask[..., 0] = True
        return mask

    yield Sample("odd sizes", arguments(63, 100))
    yield Sample("heads first in memory", arguments(60, 63, batch=2, heads=3, heads_first=True))
    yield Sample("one token", arguments(1, 1))
    yield Sample("one query", arguments(1, 100, batch=2))
    yield Sample("causal", arguments(64, 64, causal=True))
    yield Sample("causal, more keys", arguments(63, 100, causal=True))
    yield Sample("causal, more queries", arguments(100, 63, causal=True))
    yield Sample("keep a mask of rows", arguments(63, 100, batch=2, mask=kept(2, 1, 1, 100)))
    yield Sample("keep a mask", arguments(63, 64, heads=4, mask=kept(1, 4, 63, 64)))
    yield Sample("add a mask", arguments(64, 64, mask=random(1, 1, 64, 64)))
    yield Sample("add a mask in float32", arguments(7, 64, mask=random(1, 2, 7, 64).float()))
    yield Sample("fewer heads of keys", arguments(63, 63, heads=6, kv_heads=2))
    yield Sample("narrow values", arguments(63, 100, value_width=32))
    yield Sample("an odd width", arguments(7, 63, width=100, heads=3))
    yield Sample("wide heads", arguments(63, 100, width=320, heads=1))
    yield Sample("many queries", arguments(3072, 60, heads=1))
    yield Sample("many keys", arguments(7, 5120, heads=1))
    yield Sample("no queries", arguments(0, 7))
    yield Sample("no samples", arguments(7, 7, batch=0))
