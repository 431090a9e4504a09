"""Fuse the RMSNorm over channels of Wan's VAE, and a SiLU after it, into one op.

The norm is written as `F.normalize(x, dim) * sqrt(d) * weight + 0.0`.

Before:  normalize(x, dim=1) -> mul sqrt(d) -> mul weight -> add 0.0 -> silu
After:   tritium::channel_norm(x, weight, scale, shift, dim, eps, silu)
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.expression import Expr, is_scalar, nodes_between, shape_of, strip_casts, strip_widening
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.graph import same_size
from tritium.ops import channel_norm


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match the norm, with the added number and the SiLU after it if no other node reads values between."""
    expr = recogniser.canon.of(node)
    found = _site(recogniser, expr)
    reader = _reader(recogniser, node)
    if found is None or (reader is not None and _site(recogniser, recogniser.canon.of(reader)) is not None):
        return None
    return recogniser.closed(found)


def _site(recogniser: Recogniser, expr: Expr) -> Match | None:
    """Return the match that ends at an expression: a norm, its sum with a number, or a SiLU of either."""
    before: tuple[str, ...]
    if expr.op == "silu":
        outer, more, before = expr.args[0], {"silu": True}, ("mul", "add")
    elif expr.op == "add" and any(map(is_scalar, expr.args)):
        outer, shift = expr.args if is_scalar(expr.args[1]) else expr.args[::-1]
        more, before = {"shift": shift}, ("mul",)
    else:
        return _norm(expr)
    inner = strip_casts(outer)
    if not isinstance(inner, Expr) or inner.op not in before or inner.node is None or expr.node is None:
        return None
    found = _site(recogniser, inner)
    if found is None or _reader(recogniser, inner.node) is not expr.node:
        return None
    nodes = found.nodes | {expr.node} | nodes_between(outer, inner)
    return Match(expr.node, {**found.bindings, **more}, nodes)


def _reader(recogniser: Recogniser, node: fx.Node) -> fx.Node | None:
    """Return the only node that reads a value, through casts and identities; None if there are several."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if recogniser.canon.of(node).op not in ("cast", "same"):
            return node
    return None


def _norm(expr: Expr) -> Match | None:
    """Match a normalized value times a number times one weight per channel, in any order of the products."""
    if expr.op != "mul" or expr.node is None:
        return None
    for scaled, weight in (expr.args, expr.args[::-1]):
        inner = strip_casts(scaled)
        if not isinstance(weight, Expr) or not isinstance(inner, Expr) or inner.op != "mul" or inner.node is None:
            continue
        # `dynamic=True` turns a float of the module into an input: then the number may be on either side.
        normed, scale = inner.args if is_scalar(inner.args[1]) else inner.args[::-1]
        norm = strip_casts(normed)
        if not is_scalar(scale) or not isinstance(norm, Expr) or norm.op != "normalize" or norm.node is None:
            continue
        dim, eps = norm.attrs
        if not _is_weight(weight, norm, dim):
            continue
        x = strip_widening(norm.args[0])
        nodes = {expr.node, inner.node, norm.node}
        for outer, last in ((scaled, inner), (normed, norm), (norm.args[0], x)):
            nodes |= nodes_between(outer, last)
        bindings = {"x": x, "weight": weight, "scale": scale, "shift": 0.0, "dim": dim, "eps": eps, "silu": False}
        return Match(expr.node, bindings, nodes)
    return None


def _is_weight(weight: Expr, norm: Expr, dim: int) -> bool:
    """Return True for one weight per channel: size one in every other dim."""
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
