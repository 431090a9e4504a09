"""The reference, samples and trial of `qk_norm_rope`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import NARROW, Arguments, Block, Draw, Samples, Shape, Trial, count, octave, present
from tritium.ops.rope import COMPLEX, HALF, INTERLEAVED
from tritium.ops.rope import reference as rotate

HEAD, ROW, NONE = NORMS = ("head", "row", "none")
ROPES = (INTERLEAVED, HALF, COMPLEX, NONE)


def reference(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm not in NORMS or rope not in ROPES:
        raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}, or rope {rope!r} none of {', '.join(ROPES)}")
    given = [t for t in (*q, *k, *q_weights, *k_weights, *tables, *sines) if t is not None]
    wide = functools.reduce(torch.promote_types, (t.real.dtype for t in given), torch.float32)
    lengths = [part.shape[1] for part in q]
    rotations = list(zip(_each_part(tables, lengths), _each_part(sines, lengths), strict=True))

    def joined(parts: list[torch.Tensor], weights: list[torch.Tensor | None]) -> torch.Tensor:
        done = []
        for x, weight, (table, sine) in zip(parts, weights, rotations, strict=True):
            value = _normed(x.to(wide), weight, eps, norm)
            if table is not None and rope != NONE:
                over_heads = None if sine is None else sine.unsqueeze(2)
                value = rotate(value, table.unsqueeze(2), over_heads, rope, False, None)
            done.append(value.to(parts[0].dtype))
        out = torch.cat(done, dim=1)
        return out.transpose(1, 2) if heads_first else out

    return joined(q, q_weights), joined(k, k_weights)


def _each_part(tables: list[torch.Tensor | None], lengths: list[int]) -> list[torch.Tensor | None]:
    if len(tables) == len(lengths):
        return tables
    [whole] = tables
    return [None] * len(lengths) if whole is None else [*whole.split(lengths, dim=1)]


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, norm: str) -> torch.Tensor:
    if norm != NONE:
        x = x * torch.rsqrt(x.square().mean((-2, -1) if norm == ROW else -1, keepdim=True) + eps)
    if weight is None:
        return x
    return x * (weight.view(x.shape[-2:]) if norm == ROW else weight)


def arguments(
    draw: Draw,
    tokens: Sequence[int],
    heads: int,
    width: int,
    norm: str,
    rope: str,
    *,
    batch: int = 1,
    k_heads: int | None = None,
    table_batch: int = 1,
    table_width: int | None = None,
    table_dtype: torch.dtype = torch.float32,
    weighted: bool = True,
    rotated: Sequence[bool] = (True, True),
    heads_first: bool = False,
) -> dict[str, Any]:
    """Return arguments with parts of these numbers of tokens; each part has a separate weight and table."""

    def weights(heads: int) -> list[torch.Tensor | None]:
        return [draw(heads * width if norm == ROW else width) if weighted else None for _ in tokens]

    def tables() -> list[torch.Tensor | None]:
        sizes = (width // 2, 2) if rope == COMPLEX else (table_width or width,)
        return [
            draw(table_batch, length, *sizes, dtype=table_dtype) if turns and rope != NONE else None
            for length, turns in zip(tokens, rotated, strict=False)
        ]

    return {
        "q": [draw(batch, length, heads, width) for length in tokens],
        "k": [draw(batch, length, k_heads or heads, width) for length in tokens],
        "q_weights": weights(heads),
        "k_weights": weights(k_heads or heads),
        "tables": [
            torch.view_as_complex(table) if rope == COMPLEX and table is not None else table for table in tables()
        ],
        "sines": [None for _ in tokens] if rope == COMPLEX else tables(),
        "eps": 1e-6,
        "norm": norm,
        "rope": rope,
        "heads_first": heads_first,
    }


def draw_samples(draw: Draw) -> Samples:
    def sample(*form: Any, **options: Any) -> dict[str, Any]:
        return arguments(draw, *form, **options)

    for rope in (INTERLEAVED, HALF):
        for width in (2, 60, 72, 100, 126, 128):
            yield f"{rope}, heads of {width}", sample((2,), 3, width, HEAD, rope)
        yield f"{rope}, one number a pair", sample((1, 3), 3, 60, HEAD, rope, table_width=30)
        yield f"{rope}, odd pairs", sample((2,), 5, 126, ROW, rope, table_width=63, heads_first=True)
        yield f"{rope}, narrow tables", sample((2,), 3, 64, HEAD, rope, table_dtype=draw(0).dtype)
        yield f"{rope}, no norm", sample((2, 1), 3, 64, NONE, rope, weighted=False)
        yield f"{rope}, one part rotated", sample((2, 1), 3, 64, HEAD, rope, rotated=(True, False))
    yield "wide heads", sample((1, 7), 1, 256, HEAD, INTERLEAVED)
    yield "tables a sample", sample((2, 1), 3, 64, HEAD, INTERLEAVED, batch=2, table_batch=2)
    yield "no weights", sample((2,), 3, 64, HEAD, INTERLEAVED, batch=2, weighted=False)
    yield "fewer k heads", sample((2,), 12, 64, HEAD, COMPLEX, k_heads=3, heads_first=True)
    yield "fewer k heads, rows", sample((2,), 12, 64, ROW, HALF, k_heads=3)
    yield "three parts", sample((1, 2, 1), 3, 64, HEAD, HALF, rotated=(True, False, True))
    yield "FLUX", sample((1, 2), 24, 128, HEAD, INTERLEAVED)
    yield "FLUX.2: heads first", sample((1, 2), 48, 128, HEAD, INTERLEAVED, heads_first=True)
    yield "HunyuanVideo: only the image", sample((2, 1), 24, 128, HEAD, COMPLEX, rotated=(True, False))
    yield "SD3: no rotation", sample((2, 1), 38, 64, HEAD, NONE, heads_first=True)
    yield "Wan", sample((2,), 40, 128, ROW, INTERLEAVED)
    yield "Wan: rows of 3072", sample((2,), 24, 128, ROW, COMPLEX)
    yield "Wan: across attention", sample((2,), 40, 128, ROW, NONE)
    qwen = sample((1, 2), 24, 128, HEAD, COMPLEX)
    yield "Qwen-Image", qwen
    yield "Qwen-Image: real pairs", {**qwen, "tables": [torch.view_as_real(table) for table in qwen["tables"]]}
    yield "one table for both parts", {**qwen, "tables": [torch.cat(qwen["tables"], 1)], "sines": [None]}
    yield "conjugated", {**qwen, "tables": [table.conj() for table in qwen["tables"]]}
    strided = sample((7, 2), 3, 60, HEAD, INTERLEAVED, batch=2)
    strided["q"] = [draw(2, 3, 7, 60).transpose(1, 2), draw(2, 2, 9, 60)[:, :, 3:6]]
    strided["k"][0] = draw(2, 7, 60, 3).transpose(2, 3)
    strided["sines"][1] = draw(1, 60, 2, dtype=torch.float32).transpose(1, 2)
    yield "transposed", strided
    yield "no text", sample((0, 2), 3, 64, HEAD, INTERLEAVED)
    yield "nothing", sample((0,), 3, 64, HEAD, INTERLEAVED, batch=2)


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
    form = (shape["heads"], shape["width"], shape["norm"], shape["rope"])
    given = arguments(draw, _split(shape), *form, heads_first=shape["out"] == "heads")
    if shape["rope"] in (INTERLEAVED, HALF):
        given |= {name: [torch.cat(given[name], 1)] for name in ("tables", "sines")}
    return given


def _split(shape: Any) -> list[int]:
    """Return the tokens of each part; with two parts an eighth is text."""
    tokens: int = shape["tokens"]
    return [tokens] if shape["parts"] == 1 else [tokens // 8, tokens - tokens // 8]


def block(shape: Any, draw: Draw) -> Block:
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
        if rope == COMPLEX:
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
            if rope == COMPLEX:
                side = [turned(x, [table]) for x, table in zip(side, tables, strict=True)]
            joined = torch.cat(side, 2 if rope == NONE else 1) if parts > 1 else side[0]
            if rope == NONE:
                sides.append(joined)
            else:
                joined = joined if rope == COMPLEX else turned(joined, tables)
                sides.append(joined.transpose(1, 2))
        values = torch.cat([F.linear(x, v).unflatten(-1, (heads, width)) for x in xs], 1).transpose(1, 2)
        made = F.scaled_dot_product_attention(sides[0], sides[1], values)
        return F.linear(made.transpose(1, 2).flatten(2), out)

    return attention, (*streams, given["q_weights"][0], *inner, outer, *angles)


STANDARD = (
    # FLUX's double and single blocks, Qwen-Image, Wan 14B and 1.3B, SD3.5.
    (4096, 24, 128, 2, HEAD, INTERLEAVED, "tokens"),
    (4096, 24, 128, 1, HEAD, INTERLEAVED, "tokens"),
    (4096, 24, 128, 2, HEAD, COMPLEX, "tokens"),
    (8192, 40, 128, 1, ROW, INTERLEAVED, "tokens"),
    (8192, 12, 128, 1, ROW, INTERLEAVED, "tokens"),
    (4096, 38, 64, 2, HEAD, NONE, "heads"),
    # A FLUX with three heads, which the demo and CPU benchmarks run.
    (256, 3, 128, 2, HEAD, INTERLEAVED, "tokens"),
    (256, 3, 128, 1, HEAD, INTERLEAVED, "tokens"),
)
TRIAL = Trial.in_block(shape, alone, block, "tokens heads width parts norm rope out", STANDARD)
