"""Fuse a hand-written or whole RMSNorm over the last dim into `tritium::rms_norm`.

Before:  pow(x, 2) -> mean -> add eps -> rsqrt -> mul x -> mul weight
After:   tritium::rms_norm(x, weight, eps)
"""

from __future__ import annotations

from tritium.fusions.expression import shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, number, optional, tensor
from tritium.graph import same_size
from tritium.ops import rms_norm

X = tensor("x")
NORMED = form("mul", X, form("rsqrt", form("add", form("mean", form("square", X), attrs=(-1,)), number("eps"))))


def accept(match: Match) -> bool:
    """Accept a factor with one element per column; other shapes are modulations or gates, not weights."""
    weight, x = shape_of(match.bindings["weight"]), match.shape("x")
    is_weight = weight is not None and x is not None and len(weight) == 1 and same_size(weight[0], x[-1])
    return is_weight or match.bindings["weight"] is None


def decline(match: Match) -> str | None:
    dtype = match.dtype("x")
    return None if dtype is not None and dtype.is_floating_point else f"RMSNorm of {dtype}"


FUSION = Fusion(
    name="rms_norm",
    families=("rms_norm",),
    spellings=(optional(form("mul", NORMED, tensor("weight")), NORMED, weight=None),),
    before=("adalayernorm",),
    replacement=rms_norm.OP,
    accept=accept,
    decline=decline,
    doc=__doc__,
)
