"""What the kernels of `qk_norm_rope` ask of its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tritium.ops import rope as rotation
from tritium.ops.qk_norm_rope.reference import NONE

# A table has a number for each element, for each pair, or cosine and sine of each pair side by side.
ELEMENT, PAIR, COMPLEX = "element", "pair", rotation.COMPLEX


def angles(
    tables: Sequence[torch.Tensor | None], sines: Sequence[torch.Tensor | None], rope: str
) -> list[torch.Tensor]:
    """All tables that say how to turn, as real numbers."""
    return [] if rope == NONE else [real(table) for table in (*tables, *sines) if table is not None]


def real(table: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(table.resolve_conj()) if table.is_complex() else table


def table_kind(tables: Sequence[torch.Tensor | None], rope: str, width: int) -> str:
    widths = {table.shape[-1] for table in tables if table is not None}
    if rope == NONE or not widths:
        return NONE
    if rope == rotation.COMPLEX:
        return COMPLEX
    return ELEMENT if widths == {width} else PAIR


def decline_form(
    q: list[torch.Tensor], k: list[torch.Tensor], weights: list[torch.Tensor | None], angles: list[torch.Tensor]
) -> str | None:
    """Why no kernel takes parts, weights and tables of these shapes and dtypes, or None."""
    if len(q) > 2:
        return f"the kernel takes one or two parts, got {len(q)}"
    width = q[0].shape[-1]
    if any(part.shape[-1] != width for part in (*q, *k)) or width % 2:
        return "the kernel takes heads of one even width"
    sizes = [math.prod(table.shape[2:]) for table in angles]
    if any(size != sizes[0] or size not in (width, width // 2) for size in sizes):
        return f"the kernel takes tables of {width // 2} or {width} numbers a token, the same for all parts"
    for group in ((*q, *k), weights, angles):
        dtypes = {str(tensor.dtype) for tensor in group if tensor is not None}
        if len(dtypes) > 1:
            return f"the kernel takes one dtype for all parts, got {', '.join(sorted(dtypes))}"
    return None
