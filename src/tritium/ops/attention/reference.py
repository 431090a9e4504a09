"""The reference and samples of `attention`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch

from tritium.ops.op import Arguments, Draw, Samples, present

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


class Sizes(NamedTuple):
    """The sizes of an attention; a symbolic size counts as its value in the call that is being compiled."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @classmethod
    def of(cls, given: Arguments) -> Self:
        batch, heads, queries, width = map(present, given.q.shape)
        _, kv_heads, keys, value_width = map(present, given.v.shape)
        return cls(batch, heads, kv_heads, queries, keys, width, value_width)

    @property
    def score_bytes(self) -> int:
        """The bytes of all scores in float32."""
        return 4 * self.batch * self.heads * self.queries * self.keys


def arguments(
    draw: Draw,
    sizes: Sizes,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    heads_first: bool = False,
    packed: bool = True,
) -> dict[str, Any]:
    """Return random arguments; unless `packed`, every second element of a head is left out."""
    step = 1 if packed else 2

    def side(heads: int, tokens: int, width: int) -> torch.Tensor:
        outer = (sizes.batch, heads, tokens) if heads_first else (sizes.batch, tokens, heads)
        made = draw(*outer, step * width)[..., ::step]
        return made if heads_first else made.transpose(1, 2)

    q = side(sizes.heads, sizes.queries, sizes.width)
    k = side(sizes.kv_heads, sizes.keys, sizes.width)
    v = side(sizes.kv_heads, sizes.keys, sizes.value_width)
    return {"q": q, "k": k, "v": v, "mask": mask, "scale": sizes.width**-0.5, "causal": causal}


def draw_samples(draw: Draw) -> Samples:
    def sample(
        queries: int, keys: int, mask: torch.Tensor | None = None, *, causal: bool = False, **sizes: int
    ) -> dict[str, Any]:
        sizes = {"batch": 1, "heads": 2, "width": 64, **sizes}
        sizes = {"kv_heads": sizes["heads"], "value_width": sizes["width"], **sizes}
        return arguments(draw, Sizes(queries=queries, keys=keys, **sizes), mask, causal=causal)

    def kept(*shape: int) -> torch.Tensor:
        mask = draw(*shape) < 0.25
        # Providers differ in the result of a row without a key.
        mask[..., 0] = True
        return mask

    yield "odd sizes", sample(63, 100)
    yield "heads first in memory", arguments(draw, Sizes(2, 3, 3, 60, 63, 64, 64), heads_first=True)
    yield "one token", sample(1, 1)
    yield "one query", sample(1, 100, batch=2)
    yield "causal", sample(64, 64, causal=True)
    yield "causal, more keys", sample(63, 100, causal=True)
    yield "causal, more queries", sample(100, 63, causal=True)
    yield "keep a mask of rows", sample(63, 100, batch=2, mask=kept(2, 1, 1, 100))
    yield "keep a mask", sample(63, 64, heads=4, mask=kept(1, 4, 63, 64))
    yield "add a mask", sample(64, 64, mask=draw(1, 1, 64, 64))
    yield "add a mask in float32", sample(7, 64, mask=draw(1, 2, 7, 64, dtype=torch.float32))
    yield "fewer heads of keys", sample(63, 63, heads=6, kv_heads=2)
    yield "narrow values", sample(63, 100, value_width=32)
    yield "an odd width", sample(7, 63, width=100, heads=3)
    yield "wide heads", sample(63, 100, width=320, heads=1)
    yield "many queries", sample(3072, 60, heads=1)
    yield "many keys", sample(7, 5120, heads=1)
    yield "no queries", sample(0, 7)
    yield "no samples", sample(7, 7, batch=0)
