"""Norm and rotation of a query and a key in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import check_shape, check_tensors, checked
from tritium.layers.eager import compute
from tritium.ops import qk_norm_rope as op
from tritium.ops.qk_norm_rope.reference import NONE, ROW
from tritium.ops.rope import COMPLEX

Parts = torch.Tensor | Sequence[torch.Tensor]
OptionalParts = torch.Tensor | Sequence[torch.Tensor | None] | None
Several = list[torch.Tensor | None]


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
    if [part.shape[:2] for part in queries] != [part.shape[:2] for part in keys]:
        raise ArgumentError(
            f"q and k must have parts of the same batch and tokens, got {_shapes(queries)} and {_shapes(keys)}"
        )
    if queries[0].shape[-1] != keys[0].shape[-1]:
        raise ArgumentError(f"all heads must have one width, got {_shapes(queries)} and {_shapes(keys)}")
    count = len(queries)
    q_weights, k_weights = _each("q_weight", q_weight, count), _each("k_weight", k_weight, count)
    tables, sines = _each("cos", cos, count, shared=True), _each("sin", sin, count, shared=True)
    _check_weights("q_weight", q_weights, queries[0], norm)
    _check_weights("k_weight", k_weights, keys[0], norm)
    _check_tables(tables, sines, queries, rope)
    real = [table.real if table is not None and table.is_complex() else table for table in tables]
    given = [part for part in (*queries, *keys, *q_weights, *k_weights, *real, *sines) if part is not None]
    check_tensors({f"tensor {number}": part for number, part in enumerate(given)})
    # The dispatcher does not resolve conjugates in lists of optional tensors.
    tables = [None if table is None else table.resolve_conj() for table in tables]
    return compute(  # type: ignore[no-any-return]
        op.OP, fused, queries, keys, q_weights, k_weights, tables, sines, float(eps), norm, rope, head_first
    )


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
    parts: Any = [given] if isinstance(given, torch.Tensor) else list(given)
    if any(part is not None and not isinstance(part, torch.Tensor) for part in parts):
        raise ArgumentTypeError(f"{name} must hold tensors or None, got {_shapes(parts)}")
    if len(parts) != count and not (shared and len(parts) == 1):
        raise ArgumentError(f"{name} must have one entry for each of {count} parts, got {len(parts)}")
    return parts  # type: ignore[no-any-return]


def _check_weights(name: str, weights: Several, part: torch.Tensor, norm: str) -> None:
    heads, width = part.shape[2:]
    for weight in weights:
        check_shape(name, weight, (heads * width if norm == ROW else width,))


def _check_tables(tables: Several, sines: Several, parts: list[torch.Tensor], rope: str) -> None:
    """Raise unless tables have a row for each token: a kernel would read past the end of a shorter one."""
    if rope in (COMPLEX, NONE) and any(sine is not None for sine in sines):
        raise ArgumentError(f"rope {rope!r} takes no sines: leave sin out")
    if rope == NONE and any(table is not None for table in tables):
        raise ArgumentError("rope 'none' does not rotate: leave cos and sin out")
    sine_shapes = [None if sine is None else sine.shape for sine in sines]
    if rope not in (COMPLEX, NONE) and [None if table is None else table.shape for table in tables] != sine_shapes:
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
        fits = table.dim() >= 2 and table.shape[0] in (1, batch) and table.shape[1] == rows
        if not fits or tuple(table.shape[2:]) not in endings:
            shapes = " or ".join(str(["1 or B", "S", *ending]).replace("'", "") for ending in endings)
            raise ArgumentError(
                f"cos must be {shapes} with B = {batch} and S = {rows}, a row for each token; got {tuple(table.shape)}"
            )


def _shapes(parts: Sequence[Any]) -> str:
    shown = (tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts)
    return ", ".join(map(str, shown))
