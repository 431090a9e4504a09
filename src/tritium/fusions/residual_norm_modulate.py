"""Fuse a residual, its norm and the modulation into one op with two results: residual and modulated.

Before:  x + gate * y -> layer_norm or rms_norm -> mul (1 + scale) -> add shift
         x + y -> layer_norm or rms_norm, with or without a modulation
After:   tritium::residual_norm_modulate(x, y, gate, ...) -> residual, modulated
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import captured, form, given, one_of, only_reader, shared, site, tensor, value
from tritium.graph import same_shape
from tritium.ops import residual_norm_modulate

X, Y = tensor("x"), tensor("y")
SUM = one_of(form("add", X, Y, casts=False), only_reader(form("add", X, Y)))
RESIDUAL = captured("residual", one_of(site("gated_residual", casts=False), given(SUM, gate=None)))
LAYER = form("layer_norm", RESIDUAL, value("weight"), value("bias"), attrs=(value("eps"),))
NORMED = one_of(
    site("adalayernorm", x=RESIDUAL),
    given(site("rms_norm", x=RESIDUAL), bias=None, scale=None, shift=None, norm="rms"),
    given(LAYER, scale=None, shift=None, norm="layer"),
)


def accept(match: Match) -> bool:
    """Accept a norm whose input is a sum of two values of its shape."""
    bound = match.bindings
    shape = shape_of(bound["residual"])
    return bound["norm"] != "none" and all(same_shape(match.shape(name), shape) for name in ("x", "y"))


def decline(match: Match) -> str | None:
    weight = match.bindings["weight"]
    if isinstance(weight, Expr) and len(shape_of(weight) or ()) != 1:
        return "the norm's weight is not one number a column"
    if match.dtype("x") != match.dtype("y"):
        return "the two terms of the residual have different dtypes"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    return {**match.bindings, "residual_dtype": dtype_of(match.bindings["residual"]), "out_dtype": match.out.dtype}


FUSION = Fusion(
    name="residual_norm_modulate",
    families=("residual_norm_modulate",),
    spellings=(shared(NORMED),),
    outputs=("residual",),
    region=True,
    replacement=residual_norm_modulate.OP,
    accept=accept,
    decline=decline,
    used_elsewhere="a value between the residual and its modulation is used elsewhere too",
    arguments=arguments,
    doc=__doc__,
)
