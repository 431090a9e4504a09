"""Fuse a norm and the modulation after it, `norm(x) * (1 + scale) + shift`, into `tritium::ada_norm`.

Before:  layer_norm(x) -> mul (1 + scale) -> add shift
After:   tritium::ada_norm(x, weight, bias, scale, shift, eps, norm)

Forms, in any operand order, through casts:

    LayerNorm or RMSNorm, affine or not, * (1 + scale) + shift
    the same without shift
    n + n * scale + shift
    x * (1 + scale) + shift without a norm, where scale and shift have one shape

If `w` is a parameter, `1 + w` is the norm's weight and no modulation.
"""

from __future__ import annotations

from tritium import compat
from tritium.fusions.expression import Expr, dtype_of, shape_of, strip_casts
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import captured, form, given, one_of, optional, shared, site, tensor, value
from tritium.graph import same_shape
from tritium.ops import ada_norm

LAYER = form("layer_norm", tensor("x"), value("weight"), value("bias"), attrs=(value("eps"),))
NORM = one_of(
    given(site("rms_norm"), bias=None, norm="rms"),
    given(LAYER, norm="layer"),
    given(tensor("x"), weight=None, bias=None, eps=0.0, norm="none"),
)
NORMED, SCALE = captured("normed", shared(NORM)), tensor("scale")
# Two modulations may share a `1 + scale`, or a norm.
MODULATED = one_of(
    form("mul", NORMED, shared(form("add", SCALE, 1))),
    form("add", NORMED, form("mul", tensor("normed"), SCALE)),
)


def accept(match: Match) -> bool:
    """Accept tensors as scale and shift; without a norm, a shift of the scale's shape that is not the value's."""
    normed, scale, shift = (match.bindings[name] for name in ("normed", "scale", "shift"))
    dtype, shape = dtype_of(normed), shape_of(scale)
    if dtype is None or not dtype.is_floating_point or (shift is not None and shape_of(shift) is None):
        return False
    of_shift, of_x = shape_of(shift), shape_of(normed)
    if match.bindings["norm"] == "none" and (not same_shape(shape, of_shift) or same_shape(shape, of_x)):
        return False
    # A parameter with one element per column is a weight, in any form.
    source = strip_casts(scale)
    while isinstance(source, Expr) and source.op == "view":
        source = strip_casts(source.args[0])
    is_parameter = source.node is not None and compat.dynamo.is_parameter_placeholder(source.node)
    return not is_parameter or len(shape_of(source) or ()) > 1


def decline(match: Match) -> str | None:
    """Decline a norm whose weight is not one-dimensional: the op has no other form."""
    weight = match.bindings["weight"]
    if isinstance(weight, Expr) and len(shape_of(weight) or ()) != 1:
        return "the norm's weight is not one number a column"
    return None


FUSION = Fusion(
    name="adalayernorm",
    families=("adalayernorm",),
    spellings=(optional(form("add", MODULATED, value("shift")), MODULATED, shift=None),),
    before=("gated_residual", "scaled_add"),
    replacement=ada_norm.OP,
    accept=accept,
    decline=decline,
    doc=__doc__,
)
