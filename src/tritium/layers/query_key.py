"""Norm and rotation of a query and a key in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import qk_norm_rope as op
from tritium.ops.qk_norm_rope import NORMS, ROPES

Parts = torch.Tensor | Sequence[torch.Tensor]
OptionalParts = torch.Tensor | Sequence[torch.Tensor | None] | None
# `OptionalParts` as a list.
Several = list[torch.Tensor | None] | None


def qk_norm_rope(
    q: Parts,
    k: Parts,
    q_weight: OptionalParts = None,
    k_weight: OptionalParts = None,
    cos: OptionalParts = None,
    sin: OptionalParts = None,
    *,
    norm: str = "head",
    rope: str = "interleaved",
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
    sides = map(_listed, (q, k, q_weight, k_weight, cos, sin))
    return compute(_LAYER, fused, *sides, norm, rope, eps, head_first)  # type: ignore[no-any-return]


def _listed(given: Any) -> Any:
    """Return parts as a list: a tensor is one part, and None stays None."""
    if isinstance(given, torch.Tensor):
        return [given]
    return list(given) if isinstance(given, Iterable) else given


def _check(
    fused: bool,
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weight: Several,
    k_weight: Several,
    cos: Several,
    sin: Several,
    norm: str,
    rope: str,
    eps: float,
    head_first: bool,
) -> None:
    checks.text("norm", norm, NORMS)
    checks.text("rope", rope, ROPES)
    checks.number("eps", eps)
    checks.boolean("head_first", head_first)
    checks.boolean("fused", fused)
    _check_parts("q", q)
    _check_parts("k", k)
    _check_heads(q, k)
    if [part.shape[:2] for part in q] != [part.shape[:2] for part in k]:
        raise ArgumentError(f"q and k must have parts of the same batch and tokens, got {_shapes(q)} and {_shapes(k)}")
    for name, weights, parts in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        _check_each(name, weights, len(q))
        _check_weights(name, weights or [], parts[0], norm)
    for name, tables in (("cos", cos), ("sin", sin)):
        _check_each(name, tables, len(q), shared=True)
    turned, sines = (_each(tables, len(q)) for tables in (cos, sin))
    if rope in ("interleaved", "half") and [t is None for t in turned] != [t is None for t in sines]:
        raise ArgumentError(f"rope {rope!r} needs cosines and sines for the same parts")
    if rope == "complex" and any(sine is not None for sine in sines):
        raise ArgumentError("rope 'complex' has its sines in the table: leave sin out")
    if rope == "none" and any(table is not None for table in (*turned, *sines)):
        raise ArgumentError("rope 'none' turns nothing: leave cos and sin out")
    for name, given in (("cos", turned), ("sin", sines)):
        _check_tables(name, given, q, rope)
    if any(c is not None and s is not None and c.shape != s.shape for c, s in zip(turned, sines, strict=False)):
        raise ArgumentError(f"cos and sin must have one shape, got {_shapes(turned)} and {_shapes(sines)}")
    tensors = [part for part in (*q, *k, *(q_weight or ()), *(k_weight or ()), *turned, *sines) if part is not None]
    checks.together(**{f"tensor {number}": tensor for number, tensor in enumerate(tensors)})


def _arguments(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weight: Several,
    k_weight: Several,
    cos: Several,
    sin: Several,
    norm: str,
    rope: str,
    eps: float,
    head_first: bool,
) -> tuple[Any, ...]:
    each = (_each(given, len(q)) for given in (q_weight, k_weight, cos, sin))
    return q, k, *each, float(eps), norm, rope, head_first


_LAYER = Layer(op.OP, _check, _arguments)


def _each(given: Several, count: int) -> list[torch.Tensor | None]:
    return [None] * count if given is None else given


def _check_parts(name: str, parts: Any) -> None:
    if not isinstance(parts, list):
        raise ArgumentTypeError(f"{name} must be a tensor or several, got {type(parts).__name__}")
    for part in parts:
        checks.tensor(name, part)
        checks.rank(name, part, 4)
        checks.numbers_of(**{name: part})
    if not parts:
        raise ArgumentError(f"{name} has no parts")


def _check_each(name: str, parts: Any, count: int, *, shared: bool = False) -> None:
    if parts is None:
        return
    if not isinstance(parts, list):
        raise ArgumentTypeError(f"{name} must be a tensor, several or None, got {type(parts).__name__}")
    for part in parts:
        checks.tensor(name, part, optional=True)
    if len(parts) != count and not (shared and len(parts) == 1):
        raise ArgumentError(f"{name} must come one for each of {count} parts, got {len(parts)}")


def _check_heads(q: Sequence[torch.Tensor], k: Sequence[torch.Tensor]) -> None:
    """Raise unless the parts can be concatenated along tokens."""
    if any(part.shape[-1] != q[0].shape[-1] for part in (*q, *k)):
        raise ArgumentError(f"all heads must have one width, got {_shapes(q)} and {_shapes(k)}")
    for name, parts in (("q", q), ("k", k)):
        if any(part.shape[0] != parts[0].shape[0] or part.shape[2] != parts[0].shape[2] for part in parts):
            raise ArgumentError(f"parts of {name} must have one batch and as many heads, got {_shapes(parts)}")
        if any(part.dtype != parts[0].dtype for part in parts):
            listed = ", ".join(str(part.dtype) for part in parts)
            raise ArgumentTypeError(f"parts of {name} must have one dtype to be joined, got {listed}")


def _check_weights(name: str, weights: Sequence[torch.Tensor | None], part: torch.Tensor, norm: str) -> None:
    heads, width = part.shape[2:]
    wanted = heads * width if norm == "row" else width
    for weight in weights:
        if weight is not None and tuple(weight.shape) != (wanted,):
            raise ArgumentError(f"{name} must have shape ({wanted},) for norm {norm!r}, got {tuple(weight.shape)}")
        checks.numbers_of(**{name: weight})


def _check_tables(name: str, tables: Sequence[torch.Tensor | None], parts: Sequence[torch.Tensor], rope: str) -> None:
    """Raise unless tables have a row for each token: a kernel would read past the end of a shorter one."""
    batch, width = parts[0].shape[0], parts[0].shape[-1]
    tokens = [part.shape[1] for part in parts] if len(tables) == len(parts) else [sum(part.shape[1] for part in parts)]
    for table, rows in zip(tables, tokens, strict=True):
        if table is None:
            continue
        if width % 2:
            raise ArgumentError(f"heads must have an even width to have pairs, got {width}")
        endings: tuple[tuple[int, ...], ...] = ((width,), (width // 2,))
        if rope == "complex":
            # Complex numbers and pairs of real numbers have the same memory.
            endings = ((width // 2,),) if table.is_complex() else ((width // 2, 2),)
        if rope != "complex" or not table.is_complex():
            checks.numbers_of(**{name: table})
        fits = table.dim() >= 2 and table.shape[0] in (1, batch) and table.shape[1] == rows
        if not fits or tuple(table.shape[2:]) not in endings:
            shapes = " or ".join(str(["1 or B", "S", *ending]).replace("'", "") for ending in endings)
            raise ArgumentError(
                f"{name} must be {shapes} with B = {batch} and S = {rows}, a row for each token; got {tuple(table.shape)}"
            )


def _shapes(parts: Sequence[torch.Tensor | None]) -> str:
    return ", ".join("None" if part is None else str(tuple(part.shape)) for part in parts)
