"""The trial that compares the providers of `wide_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import NARROW, Arguments, Draw, Shape, Trial, count, octave, present

SAME = "same"


def shape(given: Arguments) -> Shape:
    q, k = given.q, given.k
    keys = SAME if present(k.shape[2]) == present(q.shape[2]) else octave(k.shape[2])
    return {
        "tokens": octave(q.shape[2]),
        "keys": keys,
        "heads": octave(count(q.shape[:2])),
        "width": present(q.shape[3]),
    }


def _tokens(shape: Any) -> tuple[int, int]:
    return shape["tokens"], shape["tokens"] if shape["keys"] == SAME else int(shape["keys"])


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    heads, width = shape["heads"], shape["width"]
    queries, keys = _tokens(shape)
    sides = {
        name: draw(1, tokens, heads, width).transpose(1, 2)
        for name, tokens in zip("qkv", (queries, keys, keys), strict=True)
    }
    return {**sides, "scale": width**-0.5}


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return the attention in the middle of a VAE, with projections from and to a few channels."""
    heads, width = shape["heads"], shape["width"]
    x, context = (draw(1, tokens, NARROW) for tokens in _tokens(shape))
    inner = [draw(heads * width, NARROW) / NARROW**0.5 for _ in range(3)]
    outer = draw(NARROW, heads * width) / (heads * width) ** 0.5

    def middle(
        x: torch.Tensor,
        context: torch.Tensor,
        to_q: torch.Tensor,
        to_k: torch.Tensor,
        to_v: torch.Tensor,
        outer: torch.Tensor,
    ) -> torch.Tensor:
        query, key, value = (
            F.linear(side, weight).view(1, -1, heads, width).transpose(1, 2)
            for side, weight in ((x, to_q), (context, to_k), (context, to_v))
        )
        made = F.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False)
        return F.linear(made.transpose(1, 2).reshape(1, -1, heads * width), outer)

    return middle, (x, context, *inner, outer)


TRIAL = Trial(
    shape,
    alone,
    block,
    # AutoencoderKL's middle block at 512, 1024 and 2048 pixels.
    standard=tuple({"tokens": tokens, "keys": SAME, "heads": 1, "width": 512} for tokens in (4096, 16384, 65536)),
)
