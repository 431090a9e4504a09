"""Rotary position embedding over the last dim, in float32 (float64 if x or a table is), rounded once.

Every pair (a, b) of elements becomes (a * cos - b * sin, a * sin + b * cos). `mode` defines the pairs and the form of
the rotation:

    interleaved    x[..., 2i] and x[..., 2i + 1]; `table` holds cosines, `sin` sines
    half           x[..., i] and x[..., i + d / 2]; `table` holds cosines, `sin` sines
    complex        interleaved; `table` holds cos + i sin [..., d / 2], complex or as real pairs [..., d / 2, 2]
    matrix         interleaved; `table` holds matrices [..., d / 2, 2, 2] that multiply the pairs

Cosines and sines have one value per pair (their last dim is d / 2) or per element (d); all tables are broadcast against x.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import NARROW, Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave

INTERLEAVED, HALF, COMPLEX, MATRIX = MODES = ("interleaved", "half", "complex", "matrix")


def reference(
    x: torch.Tensor,
    table: torch.Tensor,
    sin: torch.Tensor | None,
    mode: str,
    merge_heads: bool,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # Real arithmetic throughout: Inductor generates no code for complex numbers.
    tables = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (table, sin) if t is not None]
    wide = functools.reduce(torch.promote_types, (t.dtype for t in (x, *tables)), torch.float32)
    x_wide = x.to(wide)
    first, second = (_lane(x_wide, mode, index) for index in (0, 1))
    if mode == MATRIX:
        out = _joined([tables[0][..., row, 0] * first + tables[0][..., row, 1] * second for row in (0, 1)], mode)
    else:
        cos, sine = tables if mode in (INTERLEAVED, HALF) else tables[0].unbind(-1)
        rotated = _joined([-second, first], mode)
        out = x_wide * _each_element(cos, x, mode) + rotated * _each_element(sine, x, mode)
    out = out.to(out_dtype or x.dtype)
    return out.transpose(1, 2).flatten(2) if merge_heads else out


def _lane(x: torch.Tensor, mode: str, index: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x[..., index * half : (index + 1) * half] if mode == HALF else x[..., index::2]


def _joined(lanes: list[torch.Tensor], mode: str) -> torch.Tensor:
    return torch.cat(lanes, -1) if mode == HALF else torch.stack(lanes, -1).flatten(-2)


def _each_element(table: torch.Tensor, x: torch.Tensor, mode: str) -> torch.Tensor:
    """Expand a table with one value per pair to one value per element."""
    if table.shape[-1] in (1, x.shape[-1]):
        return table
    return _joined([table, table], mode)


def draw_samples(draw: Draw) -> Samples:
    def arguments(
        x: torch.Tensor, table: tuple[int, ...], mode: str, dtype: torch.dtype = torch.float32, *, merge: bool = False
    ) -> dict[str, Any]:
        sin = draw(*table, dtype=dtype) if mode in (INTERLEAVED, HALF) else None
        return {"x": x, "table": draw(*table, dtype=dtype), "sin": sin, "mode": mode, "merge_heads": merge}

    for mode in (INTERLEAVED, HALF):
        for width in (2, 60, 100, 126, 128):
            yield f"{mode}, heads of {width}", arguments(draw(2, 7, 3, width), (1, 7, 1, width), mode)
        yield f"{mode}, one number a pair", arguments(draw(2, 63, 3, 100), (63, 1, 50), mode)
        narrow = draw(2, 3, 7, 60)
        yield f"{mode}, narrow tables", arguments(narrow, (1, 1, 7, 60), mode, narrow.dtype)
        yield f"{mode}, transposed", arguments(draw(1, 63, 7, 60).transpose(1, 2), (63, 60), mode)
        yield f"{mode}, tables a sample", arguments(draw(2, 3, 7, 8), (2, 1, 7, 8), mode)
        yield f"{mode}, nothing", arguments(draw(2, 0, 3, 8), (1, 0, 1, 8), mode)
    yield "LTX: all heads in one row", arguments(draw(1, 7, 3072), (1, 7, 3072), INTERLEAVED)
    yield "a row of 5120", arguments(draw(1, 3, 5120), (3, 5120), INTERLEAVED)
    yield "FLUX q: heads after sequence", arguments(draw(1, 63, 24, 128), (1, 63, 1, 128), INTERLEAVED)
    heads_first = draw(2, 63, 3, 60).transpose(1, 2)
    yield "LTX-2: heads merged", arguments(heads_first, (2, 3, 63, 30), HALF, merge=True)
    yield "Qwen-Image: complex", arguments(draw(2, 7, 3, 60), (7, 1, 30, 2), COMPLEX)
    yield "Kandinsky: matrices", arguments(draw(2, 7, 3, 60), (7, 1, 30, 2, 2), MATRIX)


def run_aten(given: Arguments) -> torch.Tensor:
    return reference(**vars(given))


def decline_aten(given: Arguments) -> str | None:
    return None if given.mode == COMPLEX else "the model writes it in real numbers already, which Inductor can fuse"


def shape(given: Arguments) -> Shape:
    x = given.x
    return {"tokens": min(octave(count(x.shape[:-1])), MOST_ROWS), "width": octave(x.shape[-1]), "mode": given.mode}


# A row is a head of a token. More rows would not change the comparison.
MOST_ROWS = 131_072


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    heads = 16
    tokens, width = max(1, shape["tokens"] // heads), shape["width"]
    angles = draw(tokens, 1, width // 2).float()
    table = torch.stack([angles.cos(), angles.sin()], -1)
    return {
        "x": draw(1, tokens, heads, width),
        "table": torch.view_as_complex(table),
        "sin": None,
        "mode": shape["mode"],
        "merge_heads": False,
    }


def block(shape: Any, draw: Draw) -> Block:
    """Return a projection, its complex rotation, and a projection of the result."""
    given = alone(shape, draw)
    _, tokens, heads, width = given["x"].shape
    inner, outer = (draw(size, other) / other**0.5 for size, other in ((heads * width, NARROW), (NARROW, width)))

    def rotated(x: torch.Tensor, inner: torch.Tensor, table: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        q = F.linear(x, inner).unflatten(-1, (heads, width))
        pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        return F.linear(torch.view_as_real(pairs * table).flatten(3).type_as(q), outer)

    return rotated, (draw(1, tokens, NARROW), inner, given["table"], outer)


TRIAL = Trial.in_block(shape, alone, block, "tokens width mode", [(8192, 128, COMPLEX), (MOST_ROWS, 128, COMPLEX)])

# The reference is real arithmetic: inlined into the graph, Inductor fuses it with its neighbours.
PROVIDER = Provider("aten", "rope", run_aten, decline_aten, inlined=True)
OP = Op("rope", reference, draw_samples, (PROVIDER,), trial=TRIAL)
