"""Quantize a modulated norm, of a residual or of a plain value, in the kernel that computes it.

Before:  x + gate * y -> layer_norm or rms_norm -> mul (1 + scale) -> add shift -> tritium::quantize_rows
After:   tritium::norm_quantize(x, y, gate, ...) -> residual, modulated, q, scale

The modulated value is a result only if something else reads it too, such as an adapter. Without a residual, the norm reads
x. Norms without a modulation are covered as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.fusions import residual_norm_modulate
from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import captured, form, given, one_of, shared, site, tensor, value
from tritium.graph import same_shape
from tritium.ops import norm_quantize

X = tensor("x")
LAYER = form("layer_norm", X, value("weight"), value("bias"), attrs=(value("eps"),))
PLAIN = one_of(
    site("adalayernorm", x=X),
    given(site("rms_norm", x=X), bias=None, scale=None, shift=None, norm="rms"),
    given(LAYER, scale=None, shift=None, norm="layer"),
)
NORMED = one_of(residual_norm_modulate.NORMED, given(PLAIN, residual=None, y=None, gate=None))


def accept(match: Match) -> bool:
    """Accept a norm; its residual, if it has one, is a sum of two values of its shape."""
    bound = match.bindings
    if bound["norm"] == "none":
        return False
    shape = shape_of(bound["residual"])
    return bound["residual"] is None or all(same_shape(match.shape(name), shape) for name in ("x", "y"))


def decline(match: Match) -> str | None:
    weight = match.bindings["weight"]
    if isinstance(weight, Expr) and len(shape_of(weight) or ()) != 1:
        return "the norm's weight is not one number a column"
    if match.bindings["y"] is not None and match.dtype("x") != match.dtype("y"):
        return "the two terms of the residual have different dtypes"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    kept = match.outputs[1] is not None
    return {
        **bound,
        "keep": kept,
        "residual_dtype": None if bound["residual"] is None else dtype_of(bound["residual"]),
        "out_dtype": dtype_of(bound["modulated"]),
    }


FUSION = Fusion(
    name="norm_quantize",
    families=("quantize_rows",),
    spellings=(
        form(
            "quantize_rows",
            captured("modulated", shared(NORMED)),
            value("static"),
            value("step"),
            attrs=(value("dtype"), value("rotate")),
        ),
    ),
    before=("residual_norm_modulate", "quantize_parts"),
    outputs=("residual", "modulated"),
    read_outputs=("modulated",),
    region=True,
    rounds=False,
    replacement=norm_quantize.OP,
    accept=accept,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
