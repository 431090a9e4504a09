"""Fuse a residual, its norm and the modulation into one op with two results: residual and modulated.

Before:  x + gate * y -> layer_norm or rms_norm -> mul (1 + scale) -> add shift
         x + y -> layer_norm or rms_norm, with or without a modulation
After:   tritium::residual_norm_modulate(x, y, gate, ...) -> residual, modulated
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tritium.fusions.expression import (
    Expr,
    dtype_of,
    nodes_between,
    shape_of,
    strip_in_place,
    strip_same,
    strip_widening,
)
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.graph import same_shape, value_of
from tritium.ops import residual_norm_modulate


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a norm, modulated or not, whose input is a sum of two values of its shape."""
    normed = _norm(recogniser, node)
    if normed is None:
        return None
    x = normed.bindings["x"]
    summed = strip_widening(x)
    residual = _residual(recogniser, summed)
    if residual is None:
        return None
    root, nodes = normed.root, normed.nodes | normed.inner | residual.nodes | residual.inner | nodes_between(x, summed)
    repeats = {node for node in nodes if recogniser.canon.of(node).op in ("same", "cast")}
    return Match(
        root,
        {**normed.bindings, **residual.bindings, "repeats": repeats},
        {root, residual.root},
        nodes - {root, residual.root},
        covers=(*normed.covers, *residual.covers),
        outputs=(residual.root, root),
    )


def _norm(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Return the norm that ends at a node, including a modulation after it."""
    found = recogniser.sites.get(node)
    if found is None:
        return _layer_norm(recogniser, node)
    fusion, match = found
    bound = match.bindings
    if fusion.name == "adalayernorm" and bound["norm"] != "none":
        return Match(node, bound, match.nodes, match.inner, covers=("adalayernorm", *match.covers))
    if fusion.name == "rms_norm" and not _is_modulated(recogniser, node):
        bindings = _unmodulated(bound["x"], bound.get("weight"), None, bound["eps"], "rms")
        return Match(node, bindings, match.nodes, match.inner, covers=("rms_norm",))
    return None


def _layer_norm(recogniser: Recogniser, node: fx.Node) -> Match | None:
    expr = recogniser.canon.of(node)
    if expr.op != "layer_norm" or _is_modulated(recogniser, node):
        return None
    x, weight, bias = expr.args
    return recogniser.closed(Match(node, _unmodulated(x, weight, bias, expr.attrs[0], "layer"), {node}))


def _unmodulated(x: Any, weight: Any, bias: Any, eps: Any, norm: str) -> dict[str, Any]:
    return {"x": x, "weight": weight, "bias": bias, "scale": None, "shift": None, "eps": eps, "norm": norm}


def _is_modulated(recogniser: Recogniser, node: fx.Node) -> bool:
    return any(fusion.name == "adalayernorm" and node in match.inner for fusion, match in recogniser.sites.values())


def _residual(recogniser: Recogniser, expr: Expr) -> Match | None:
    """Match a sum: a gated residual, or a plain sum of two tensors of the expression's shape."""
    if expr.node is None:
        return None
    passed: set[fx.Node] = set()
    fusion, site = recogniser.sites.get(expr.node, (None, None))
    if fusion is not None and site is not None and fusion.name == "gated_residual":
        x, gate, y = (site.bindings[name] for name in ("x", "gate", "y"))
        bindings = {
            "x": recogniser.source(x, passed),
            "gate": gate,
            "y": recogniser.source(y, passed),
        }
        return Match(expr.node, bindings, site.nodes, site.inner | passed, covers=("mul_add",))
    inner = strip_same(expr.args[0]) if expr.op == "cast" else expr
    if not isinstance(inner, Expr) or inner.op != "add" or inner.node is None or inner.node in recogniser.sites:
        return None
    if expr.op == "cast" and len(inner.node.users) > 1:
        return None
    terms = [strip_in_place(arg) for arg in inner.args]
    if not all(isinstance(term, Expr) and same_shape(shape_of(term), shape_of(expr)) for term in terms):
        return None
    x, y = (recogniser.source(term, passed) for term in terms)
    between = {inner.node} | nodes_between(expr, inner)
    for arg, term in zip(inner.args, terms, strict=True):
        between |= nodes_between(arg, term)
    return Match(expr.node, {"x": x, "gate": None, "y": y}, between, passed)


def decline(match: Match) -> str | None:
    weight, shape = match.bindings["weight"], value_of(match.outputs[0]).shape
    if isinstance(weight, Expr) and len(shape_of(weight) or ()) != 1:
        return "the norm's weight is not one number a column"
    if len({dtype_of(match.bindings[name]) for name in ("x", "y")}) > 1:
        return "the two terms of the residual have different dtypes"
    inside = match.nodes | match.inner
    # Nodes that only repeat a value may have other readers; other values would be computed twice.
    for node in inside - set(match.values) - match.bindings["repeats"]:
        value = value_of(node)
        if same_shape(getattr(value, "shape", None), shape) and any(user not in inside for user in node.users):
            return "a value between the residual and its modulation is used elsewhere too"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    names = ("x", "y", "gate", "weight", "bias", "scale", "shift", "eps", "norm")
    residual, out = (value_of(node).dtype for node in match.outputs)
    return {**{name: bound[name] for name in names}, "residual_dtype": residual, "out_dtype": out}


FUSION = Fusion(
    name="residual_norm_modulate",
    families=("residual_norm_modulate",),
    find=find,
    region=True,
    replacement=residual_norm_modulate.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
