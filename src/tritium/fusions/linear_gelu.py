"""Fuse a GELU into the linear in front of it: the activation can be the GEMM's epilogue.

Before:  linear(x) -> gelu
After:   tritium::linear_gelu(x, weight, bias, approximate)
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.expression import Expr, strip_same
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import linear_gelu


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a GELU of a linear's whole result; a GELU of a half or a slice is a gate."""
    expr = recogniser.canon.of(node)
    if expr.op != "gelu":
        return None
    linear = strip_same(expr.args[0])
    if not isinstance(linear, Expr) or linear.op != "linear" or linear.node is None:
        return None
    x, weight, bias = linear.args
    bindings = {"x": x, "weight": weight, "bias": bias, "approximate": expr.attrs[0]}
    return Match(node, bindings, {node, linear.node}, covers=("gelu",))


def decline(match: Match) -> str | None:
    """Decline if another node reads the linear's result."""
    linear = next(node for node in match.nodes if node is not match.root)
    return "the linear's result is used elsewhere too" if len(linear.users) > 1 else None


FUSION = Fusion(
    name="linear_gelu",
    families=("linear_gelu",),
    find=find,
    region=True,
    replacement=linear_gelu.OP,
    decline=decline,
    doc=__doc__,
)
