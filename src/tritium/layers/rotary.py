"""Rotary position embedding, alone and behind the norm of a query and a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import check_broadcast, check_rank, check_shape, check_tensors, checked
from tritium.layers.eager import compute
from tritium.ops import qk_norm_rope as qk
from tritium.ops import rope as rope_op
from tritium.ops.qk_norm_rope.reference import NONE, ROW
from tritium.ops.rope import COMPLEX

# The names of pairings of `rotary_position_embedding`, and the op's.
MODES = {"rotated_half": rope_op.HALF, "rotated_interleaved": rope_op.INTERLEAVED}

Parts = torch.Tensor | Sequence[torch.Tensor]
OptionalParts = torch.Tensor | Sequence[torch.Tensor | None] | None
Several = list[torch.Tensor | None]


@checked
def rotary_position_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotated_mode: Literal["rotated_half", "rotated_interleaved"] = "rotated_half",
    head_first: bool = False,
    fused: bool = True,
) -> torch.Tensor:
    """Rotate every pair of elements of a head by its angle, in float32, rounded to the dtype of `x`.

    Args:
        x: [B, S, N, D], or [B, N, S, D] with `head_first`; with 4-D tables also [S, B, N, D].
        cos: Cosines, [S, D], or 4-D and broadcastable to `x`. One value per element (D) or per pair (D / 2).
        sin: Sines of the same shape.
        rotated_mode: `rotated_half` pairs elements i and i + D / 2, `rotated_interleaved` pairs 2 i and 2 i + 1.
        head_first: Whether heads come before tokens.
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    check_rank("x", x, 4)
    check_rank("cos", cos, 2, 4)
    check_shape("sin", sin, tuple(cos.shape))
    width, tokens = x.shape[-1], x.shape[2 if head_first else 1]
    if width % 2 or cos.shape[-1] not in (width, width // 2):
        raise ArgumentError(
            f"heads of an even width D need tables of D or D / 2 columns, got {cos.shape[-1]} columns for D = {width}"
        )
    if cos.dim() == 2 and cos.shape[0] != tokens:
        raise ArgumentError(
            f"a 2-D table has a row for each token: got {cos.shape[0]} rows for {tokens} tokens of x "
            f"{tuple(x.shape)} with head_first={head_first}"
        )
    if cos.dim() == 2 and not head_first:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    check_broadcast("cos", cos[..., :1], tuple(x.shape))
    return compute(rope_op.OP, fused, x, cos, sin, MODES[rotated_mode], False, None)  # type: ignore[no-any-return]


@checked
def qk_norm_rope(
    q: Parts,
    k: Parts,
    q_weight: OptionalParts = None,
    k_weight: OptionalParts = None,
    cos: OptionalParts = None,
    sin: OptionalParts = None,
    *,
    norm: Literal["head", "row", "none"] = "head",
    rope: Literal["interleaved", "half", "complex", "none"] = "interleaved",
    eps: float = 1e-6,
    head_first: bool = False,
    fused: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize and rotate the parts of a query and of a key, and concatenate each along tokens.

    Args:
        q: [B, S, N, D], or a list of parts such as text and image, in the order of the result.
        k: The same for the key; it may have fewer heads.
        q_weight: The norm's weight of each part, [D], or [N * D] for norm `row`; None for no weight.
        k_weight: The same for the key.
        cos: Cosines [B or 1, S, D or D / 2] of each part, or one table for all; None for a part that is not rotated.
            With rope `complex` the tables hold cosine and sine as complex numbers [B or 1, S, D / 2].
        sin: Sines, or None with rope `complex`.
        norm: The extent of the RMS norm: each `head`, each `row` of all heads, or `none`.
        rope: `interleaved`, `half`, `complex` or `none`.
        eps: A small number that avoids division by zero in the norm.
        head_first: Whether the results are [B, N, S, D] instead of [B, S, N, D].
        fused: Whether a fused kernel may compute it; False runs PyTorch operators.
    """
    queries, keys = _parts("q", q), _parts("k", k)
    if [(*part.shape[:2], part.shape[3]) for part in queries] != [(*part.shape[:2], part.shape[3]) for part in keys]:
        raise ArgumentError(
            "q and k must have parts of the same batch and tokens, with heads of one width, "
            f"got {_shapes(queries)} and {_shapes(keys)}"
        )
    q_weights, k_weights = (
        _each(name, weights, len(queries)) for name, weights in (("q_weight", q_weight), ("k_weight", k_weight))
    )
    tables, sines = (_each(name, given, len(queries), shared=True) for name, given in (("cos", cos), ("sin", sin)))
    for name, weights, (heads, width) in (
        ("q_weight", q_weights, queries[0].shape[2:]),
        ("k_weight", k_weights, keys[0].shape[2:]),
    ):
        for weight in weights:
            check_shape(name, weight, (heads * width if norm == ROW else width,))
    _check_tables(tables, sines, queries, rope)
    real = [table.real if table is not None and table.is_complex() else table for table in tables]
    given = [part for part in (*queries, *keys, *q_weights, *k_weights, *real, *sines) if part is not None]
    check_tensors({f"tensor {number}": part for number, part in enumerate(given)})
    # The dispatcher does not resolve conjugates in lists of optional tensors.
    tables = [None if table is None else table.resolve_conj() for table in tables]
    arguments = queries, keys, q_weights, k_weights, tables, sines, float(eps), norm, rope, head_first
    return compute(qk.OP, fused, *arguments)  # type: ignore[no-any-return]


def _parts(name: str, given: Parts) -> list[torch.Tensor]:
    """Return parts as a list; raise unless they can be concatenated along tokens."""
    parts = [given] if isinstance(given, torch.Tensor) else list(given)
    if not parts or any(not isinstance(part, torch.Tensor) or part.dim() != 4 for part in parts):
        raise ArgumentError(f"{name} must be a tensor [B, S, N, D] or a list of such, got {_shapes(parts)}")
    first = parts[0]
    for part in parts:
        if (part.shape[0], *part.shape[2:]) != (first.shape[0], *first.shape[2:]):
            raise ArgumentError(f"parts of {name} must have one batch, as many heads and one width: {_shapes(parts)}")
        if part.dtype != first.dtype:
            raise ArgumentTypeError(f"parts of {name} must have one dtype, got {first.dtype} and {part.dtype}")
    return parts


def _each(name: str, given: OptionalParts, count: int, *, shared: bool = False) -> Several:
    """Return one tensor or None for each part; with `shared` one for all parts is accepted."""
    if given is None:
        return [None] * count
    parts: Several = [given] if isinstance(given, torch.Tensor) else list(given)
    if len(parts) != count and not (shared and len(parts) == 1):
        raise ArgumentError(f"{name} must have one entry for each of {count} parts, got {len(parts)}")
    return parts


def _check_tables(tables: Several, sines: Several, parts: list[torch.Tensor], rope: str) -> None:
    """Raise unless tables have a row for each token: a kernel would read past the end of a shorter one."""
    unused: Several = {NONE: [*tables, *sines], COMPLEX: sines}.get(rope, [])
    if any(table is not None for table in unused):
        raise ArgumentError(
            f"rope {rope!r} takes no {'cosines and sines' if rope == NONE else 'sines'}: leave them out"
        )
    sizes, sine_sizes = ([None if part is None else part.shape for part in several] for several in (tables, sines))
    if rope not in (COMPLEX, NONE) and sizes != sine_sizes:
        raise ArgumentError(
            f"cosines and sines must have the same shapes for each part, got {_shapes(tables)} and {_shapes(sines)}"
        )
    batch, width = parts[0].shape[0], parts[0].shape[-1]
    tokens = [part.shape[1] for part in parts] if len(tables) == len(parts) else [sum(part.shape[1] for part in parts)]
    for table, rows in zip(tables, tokens, strict=True):
        if table is None:
            continue
        if width % 2:
            raise ArgumentError(f"heads must have an even width to have pairs, got {width}")
        endings: tuple[tuple[int, ...], ...] = ((width,), (width // 2,))
        if rope == COMPLEX:
            # Complex numbers and pairs of real numbers have the same memory.
            endings = ((width // 2,),) if table.is_complex() else ((width // 2, 2),)
        elif table.is_complex():
            raise ArgumentTypeError(
                f"cos must be real for rope {rope!r}, got {table.dtype}; 'complex' takes such tables"
            )
        has_rows = table.dim() >= 2 and table.shape[0] in (1, batch) and table.shape[1] == rows
        if not has_rows or tuple(table.shape[2:]) not in endings:
            shapes = " or ".join(str(["1 or B", "S", *ending]).replace("'", "") for ending in endings)
            raise ArgumentError(
                f"cos must be {shapes} with B = {batch} and S = {rows}, a row for each token; got {tuple(table.shape)}"
            )


def _shapes(parts: Sequence[Any]) -> str:
    return ", ".join(f"{tuple(part.shape) if isinstance(part, torch.Tensor) else part}" for part in parts)
