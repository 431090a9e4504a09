"""Fuse `x + gate * y`, the gated residual of a transformer block, into `tritium::gated_residual`.

Before:  mul(gate, y) -> add(x, .)
After:   tritium::gated_residual(x, gate, y)
"""

from __future__ import annotations

import torch

from tritium.fusions.expression import Expr, shape_of, strip_casts
from tritium.fusions.fusion import Fusion, Match
from tritium.graph import same_shape
from tritium.ops import gated_residual


def residual(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + gate * y


def accept(match: Match) -> bool:
    """Accept x and y of the result's shape, and a gate that broadcasts to it; not the rest of a RoPE."""
    if not isinstance(match.out, torch.Tensor) or not match.out.dtype.is_floating_point:
        return False
    out, gate = match.out.shape, match.shape("gate")
    if not same_shape(match.shape("x"), out) or not same_shape(match.shape("y"), out) or not gate:
        return False
    return not _is_scaled(match.bindings["x"], gate)


def _is_scaled(x: Expr, gate: torch.Size) -> bool:
    """Return True if x is a product with a factor of the gate's shape: `x * cos + turned * sin` is a RoPE."""
    inner = strip_casts(x)
    return inner.op == "mul" and any(same_shape(shape_of(arg), gate) for arg in inner.args if isinstance(arg, Expr))


FUSION = Fusion(
    name="gated_residual",
    families=("mul_add",),
    spellings=(residual,),
    before=("scaled_add",),
    replacement=gated_residual.OP,
    accept=accept,
    doc=__doc__,
)
