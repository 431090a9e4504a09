"""Fuse GroupNorm and the SiLU after it, the pair in front of every convolution of a UNet or VAE.

Before:  group_norm(x) -> silu
After:   tritium::group_norm_silu(x, groups, weight, bias, eps)
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.expression import Expr, nodes_between, strip_casts
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import group_norm_silu


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """A SiLU whose operand is a GroupNorm, casts and eval dropout between them aside."""
    expr = recogniser.canon.of(node)
    if expr.op != "silu":
        return None
    norm = strip_casts(expr.args[0])
    if not isinstance(norm, Expr) or norm.op != "group_norm" or norm.node is None:
        return None
    nodes = {node, norm.node} | nodes_between(expr.args[0], norm)
    x, weight, bias = norm.args
    groups, eps = norm.attrs
    bindings = {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": eps}
    return recogniser.closed(Match(node, bindings, nodes))


FUSION = Fusion(
    name="group_norm_silu",
    families=("group_norm_silu",),
    find=find,
    replacement=group_norm_silu.OP,
    doc=__doc__,
)
