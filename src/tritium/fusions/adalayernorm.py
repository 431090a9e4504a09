"""Fuse a norm and the modulation after it, `norm(x) * (1 + scale) + shift`, into `tritium::ada_norm`.

Before:  layer_norm(x) -> mul (1 + scale) -> add shift
After:   tritium::ada_norm(x, weight, bias, scale, shift, eps, norm)

Forms, in any operand order, through casts:

    LayerNorm or RMSNorm, affine or not, * (1 + scale) + shift
    the same without shift
    n + n * scale + shift
    x * (1 + scale) + shift without a norm, where scale and shift have one shape
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.fusions.expression import Expr, is_number, nodes_between, shape_of, strip_casts, strip_same, strip_widening
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser, same_value
from tritium.graph import same_shape, value_of
from tritium.ops import ada_norm


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a product with `1 + scale` whose other factor is a norm.

    If `w` is a parameter, `1 + w` is the norm's weight and no modulation.
    """
    expr = recogniser.canon.of(node)
    for scaled, shift, nodes in _sums(expr):
        found = _modulated(recogniser, scaled, shift)
        if found is not None:
            bindings, inner, own, covers = found
            return recogniser.closed(Match(node, bindings, nodes | own, inner, covers=covers))
    return None


def _sums(expr: Expr) -> Iterator[tuple[Any, Any, set[fx.Node]]]:
    """Yield the ways to read an expression as a product plus a shift, or as a product alone."""
    if expr.op == "add" and expr.node is not None:
        for scaled, shift in (expr.args, expr.args[::-1]):
            if isinstance(scaled, Expr) and isinstance(shift, Expr):
                yield scaled, shift, {expr.node}
    elif expr.op == "mul" and expr.node is not None:
        yield expr, None, set()


def _modulated(
    recogniser: Recogniser, scaled: Expr, shift: Expr | None
) -> tuple[dict[str, Any], set[fx.Node], set[fx.Node], tuple[str, ...]] | None:
    product = strip_casts(scaled)
    own = nodes_between(scaled, product)
    for normed, scale, nodes in _products(product):
        if not _is_modulation(normed, scale, shift):
            continue
        norm = _norm_of(recogniser, normed)
        if norm is None:
            if shift is None or not same_shape(_shape(scale), _shape(shift)) or not _is_smaller(scale, normed):
                continue
            x = strip_widening(normed)
            norm = {"x": x, "weight": None, "bias": None, "eps": 0.0, "norm": "none"}, set(), ()
        bindings, inner, covers = norm
        return {**bindings, "scale": scale, "shift": shift}, inner, own | nodes, covers
    return None


def _held_by(expr: Expr) -> set[fx.Node]:
    return {expr.node} if expr.node is not None else set()


def _products(product: Any) -> Iterator[tuple[Any, Any, set[fx.Node]]]:
    """Yield n and s of `n * (1 + s)` and `n + n * s`."""
    if not isinstance(product, Expr):
        return
    held = _held_by(product)
    if product.op == "mul":
        for normed, factor in (product.args, product.args[::-1]):
            inner = strip_casts(factor)
            if isinstance(normed, Expr) and isinstance(inner, Expr) and inner.op == "add":
                scale, one = inner.args
                if is_number(one) and one == 1 and isinstance(scale, Expr):
                    nodes = nodes_between(factor, inner) | _held_by(inner)
                    # A `1 + s` that two modulations share does not belong to this site alone.
                    yield normed, strip_widening(scale), held | {n for n in nodes if len(n.users) == 1}
    elif product.op == "add":
        for normed, other in (product.args, product.args[::-1]):
            inner = strip_casts(other)
            if not isinstance(normed, Expr) or not isinstance(inner, Expr) or inner.op != "mul":
                continue
            for again, scale in (inner.args, inner.args[::-1]):
                if isinstance(scale, Expr) and same_value(again, normed):
                    nodes = nodes_between(other, inner) | _held_by(inner)
                    yield normed, strip_widening(scale), held | nodes


def _is_modulation(normed: Expr, scale: Expr, shift: Expr | None) -> bool:
    out, of_scale = shape_of(normed), _shape(scale)
    if out is None or of_scale is None or not _floating(normed):
        return False
    # A parameter with one element per column is a weight, in any form.
    source = strip_casts(scale)
    while isinstance(source, Expr) and source.op == "view":
        source = strip_casts(source.args[0])
    if isinstance(source, Expr) and source.node is not None and compat.dynamo.is_parameter_placeholder(source.node):
        return len(shape_of(source) or ()) > 1
    return shift is None or _shape(shift) is not None


def _shape(expr: Expr) -> torch.Size | None:
    if expr.node is None and expr.op == "view":
        value = value_of(expr.attrs[0])
        return value.shape if isinstance(value, torch.Tensor) else None
    return shape_of(expr)


def _is_smaller(scale: Expr, normed: Expr) -> bool:
    of_scale, out = _shape(scale), shape_of(normed)
    return of_scale is not None and out is not None and not same_shape(of_scale, out)


def _floating(expr: Expr) -> bool:
    value = strip_same(expr).value
    return value is None or (isinstance(value, torch.Tensor) and value.dtype.is_floating_point)


def _norm_of(recogniser: Recogniser, normed: Expr) -> tuple[dict[str, Any], set[fx.Node], tuple[str, ...]] | None:
    """Return the bindings of the norm behind a value, its nodes, and its family."""
    site = recogniser.site_at(normed, "rms_norm")
    if site is not None:
        between = nodes_between(normed, strip_casts(normed))
        bound = site.bindings
        names = {"x": bound["x"], "weight": bound.get("weight"), "bias": None, "eps": bound["eps"], "norm": "rms"}
        return names, site.nodes | between, ("rms_norm",)
    inner = strip_casts(normed)
    if inner.op != "layer_norm":
        return None
    x, weight, bias = inner.args
    nodes = nodes_between(normed, inner) | _held_by(inner)
    x_in = strip_widening(x)
    nodes |= nodes_between(x, x_in)
    names = {"x": x_in, "weight": weight, "bias": bias, "eps": inner.attrs[0], "norm": "layer"}
    return names, nodes, ()


def decline(match: Match) -> str | None:
    """Decline a norm whose weight is not one-dimensional: the op has no other form."""
    weight = match.bindings["weight"]
    if isinstance(weight, Expr) and len(shape_of(weight) or ()) != 1:
        return "the norm's weight is not one number a column"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    names = ("x", "weight", "bias", "scale", "shift", "eps", "norm")
    return {**{name: bound[name] for name in names}, "out_dtype": match.out.dtype}


FUSION = Fusion(
    name="adalayernorm",
    families=("adalayernorm",),
    find=find,
    priority=0,
    replacement=ada_norm.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
