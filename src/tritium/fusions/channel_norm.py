"""Fuse `F.normalize(x, dim) * sqrt(d) * weight`, the RMSNorm over channels of Wan's VAE, into `tritium::channel_norm`.

Before:  normalize(x, dim=1) -> mul sqrt(d) -> mul weight
After:   tritium::channel_norm(x, weight, scale, dim, eps)
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.expression import Expr, is_scalar, nodes_between, same_size, shape_of, strip_casts, strip_widening
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import channel_norm


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """A normalized value times a number times one weight a channel, in any order of the two products."""
    expr = recogniser.canon.of(node)
    if expr.op != "mul":
        return None
    for scaled, weight in (expr.args, expr.args[::-1]):
        inner = strip_casts(scaled)
        if not isinstance(weight, Expr) or not isinstance(inner, Expr) or inner.op != "mul" or inner.node is None:
            continue
        # `dynamic=True` makes a float of the module an input: then the number may stand on either side.
        normed, scale = inner.args if is_scalar(inner.args[1]) else inner.args[::-1]
        norm = strip_casts(normed)
        if not is_scalar(scale) or not isinstance(norm, Expr) or norm.op != "normalize" or norm.node is None:
            continue
        dim, eps = norm.attrs
        if not _is_weight(weight, norm, dim):
            continue
        x = strip_widening(norm.args[0])
        nodes = {node, inner.node, norm.node}
        for outer, last in ((scaled, inner), (normed, norm), (norm.args[0], x)):
            nodes |= nodes_between(outer, last)
        bindings = {"x": x, "weight": weight, "scale": scale, "dim": dim, "eps": eps}
        return recogniser.closed(Match(node, bindings, nodes))
    return None


def _is_weight(weight: Expr, norm: Expr, dim: int) -> bool:
    """One number a channel: of size one in every other dim."""
    of_weight, of_x = shape_of(weight), shape_of(norm)
    if of_weight is None or of_x is None:
        return False
    aligned = [1] * (len(of_x) - len(of_weight)) + list(of_weight)
    return len(of_weight) <= len(of_x) and all(
        same_size(size, of_x[index] if index == dim else 1) for index, size in enumerate(aligned)
    )


FUSION = Fusion(
    name="channel_norm",
    families=("rms_norm",),
    find=find,
    priority=10,
    replacement=channel_norm.OP,
    doc=__doc__,
)
