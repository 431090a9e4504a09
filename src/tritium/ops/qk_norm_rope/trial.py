"""The trial that compares the providers of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops import rope as rotation
from tritium.ops.op import NARROW, Arguments, Draw, Shape, Trial, count, octave, present
from tritium.ops.qk_norm_rope.reference import HEAD, NONE, ROW


def shape(given: Arguments) -> Shape:
    q = given.q
    tokens = sum(count((part.shape[0], part.shape[1])) for part in q)
    return {
        "tokens": min(octave(tokens), MOST_TOKENS),
        "heads": present(q[0].shape[2]),
        "width": present(q[0].shape[3]),
        "parts": len(q),
        "norm": given.norm,
        "rope": given.rope,
        "out": "heads" if given.heads_first else "tokens",
    }


# More tokens would not change the comparison, but the block's attention grows with their square.
MOST_TOKENS = 8192


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    heads, width, rope = shape["heads"], shape["width"], shape["rope"]
    sizes = _split(shape)
    weight = draw(heads * width if shape["norm"] == ROW else width)
    angles = [draw(1, size, width // 2).float() for size in sizes]
    tables: list[torch.Tensor | None] = [None] * len(sizes)
    sines: list[torch.Tensor | None] = [None] * len(sizes)
    if rope == rotation.COMPLEX:
        tables = [torch.view_as_complex(torch.stack([angle.cos(), angle.sin()], -1)) for angle in angles]
    elif rope != NONE:
        whole = torch.cat(angles, 1).repeat_interleave(2, -1)
        tables, sines = [whole.cos()], [whole.sin()]
    return {
        "q": [draw(1, size, heads, width) for size in sizes],
        "k": [draw(1, size, heads, width) for size in sizes],
        "q_weights": [weight] * len(sizes),
        "k_weights": [weight] * len(sizes),
        "tables": tables,
        "sines": sines,
        "eps": 1e-6,
        "norm": shape["norm"],
        "rope": rope,
        "heads_first": shape["out"] == "heads",
    }


def _split(shape: Any) -> list[int]:
    """Return the tokens of each part; with two parts an eighth is text."""
    tokens: int = shape["tokens"]
    return [tokens] if shape["parts"] == 1 else [tokens // 8, tokens - tokens // 8]


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return an attention between narrow projections, as in FLUX, Qwen-Image, Wan or SD3."""
    given = alone(shape, draw)
    heads, width, rope, by_row = shape["heads"], shape["width"], shape["rope"], shape["norm"] == ROW
    parts = len(given["q"])
    streams = [draw(1, size, NARROW) for size in _split(shape)]
    inner = [draw(heads * width, NARROW) / NARROW**0.5 for _ in "qkv"]
    outer = draw(NARROW, heads * width) / (heads * width) ** 0.5
    angles = [table for table in (*given["tables"], *given["sines"]) if table is not None]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if by_row:
            x = F.rms_norm(x, (heads * width,), weight, 1e-6)
            return torch.unflatten(x, -1, (heads, width))
        x = x.unflatten(-1, (heads, width))
        x = x.transpose(1, 2) if rope == NONE else x
        return F.rms_norm(x, (width,), weight, 1e-6)

    def turned(x: torch.Tensor, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        if rope == rotation.COMPLEX:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * tables[0].unsqueeze(2)).flatten(3).type_as(x)
        first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        crossed = torch.stack([-second, first], -1).flatten(3)
        cos, sin = (table.unsqueeze(2) for table in tables)
        return (x.float() * cos + crossed.float() * sin).to(x.dtype)

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        xs, (weight, q, k, v, out), tables = inputs[:parts], inputs[parts : parts + 5], inputs[parts + 5 :]
        sides = []
        for project in (q, k):
            side = [normed(F.linear(x, project), weight) for x in xs]
            if rope == rotation.COMPLEX:
                side = [turned(x, [table]) for x, table in zip(side, tables, strict=True)]
            joined = torch.cat(side, 2 if rope == NONE else 1) if parts > 1 else side[0]
            if rope == NONE:
                sides.append(joined)
            else:
                joined = joined if rope == rotation.COMPLEX else turned(joined, tables)
                sides.append(joined.transpose(1, 2))
        values = torch.cat([F.linear(x, v).unflatten(-1, (heads, width)) for x in xs], 1).transpose(1, 2)
        made = F.scaled_dot_product_attention(sides[0], sides[1], values)
        return F.linear(made.transpose(1, 2).flatten(2), out)

    return attention, (*streams, given["q_weights"][0], *inner, outer, *angles)


TRIAL = Trial(
    shape,
    alone,
    block,
    standard=tuple(
        {"tokens": tokens, "heads": heads, "width": width, "parts": parts, "norm": norm, "rope": rope, "out": out}
        for tokens, heads, width, parts, norm, rope, out in (
            # FLUX's double and single blocks, Qwen-Image, Wan 14B and 1.3B, SD3.5.
            (4096, 24, 128, 2, HEAD, rotation.INTERLEAVED, "tokens"),
            (4096, 24, 128, 1, HEAD, rotation.INTERLEAVED, "tokens"),
            (4096, 24, 128, 2, HEAD, rotation.COMPLEX, "tokens"),
            (8192, 40, 128, 1, ROW, rotation.INTERLEAVED, "tokens"),
            (8192, 12, 128, 1, ROW, rotation.INTERLEAVED, "tokens"),
            (4096, 38, 64, 2, HEAD, NONE, "heads"),
            # A FLUX with three heads, which the demo and CPU benchmarks run.
            (256, 3, 128, 2, HEAD, rotation.INTERLEAVED, "tokens"),
            (256, 3, 128, 1, HEAD, rotation.INTERLEAVED, "tokens"),
        )
    ),
)
