"""Canonical expressions: one form for all spellings of the same arithmetic.

The graph is not rewritten. Every node gets an `Expr`; nodes that differ only in spelling disappear. The modules of
`canonical` build them and list the forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium.graph import same_shape, value_of


@dataclass(frozen=True, eq=False)
class Expr:
    """One value. `node` is the FX node that holds it, or None inside an expanded form."""

    op: str
    args: tuple[Any, ...] = ()
    node: fx.Node | None = None
    attrs: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        """Return Dynamo's fake tensor (or number) for this value; None in a traced pattern."""
        return value_of(self.node) if self.node is not None else None

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        name = self.node.name if self.node is not None and not self.args else ""
        return f"{self.op}({inner or name})"


def dtype_of(expr: Any) -> torch.dtype | None:
    value = expr.value if isinstance(expr, Expr) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def shape_of(expr: Any) -> torch.Size | None:
    """Return a tensor's shape; a view that no node holds has the shape of the model's view of `1 + s`."""
    value = expr.value if isinstance(expr, Expr) else None
    if isinstance(expr, Expr) and expr.node is None and expr.op == "view" and expr.attrs:
        value = value_of(expr.attrs[0])
    return value.shape if isinstance(value, torch.Tensor) else None


def is_number(thing: Any) -> bool:
    return isinstance(thing, (int, float)) and not isinstance(thing, bool)


def is_scalar(thing: Any) -> bool:
    """Return True for a number, or a value of the graph that is a number."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return is_number(thing) or (isinstance(thing, Expr) and isinstance(thing.value, numbers))


def add(left: Any, right: Any, node: fx.Node | None = None) -> Expr:
    if is_number(left):
        left, right = right, left
    return Expr("add", (left, right), node)


def mul(left: Any, right: Any, node: fx.Node | None = None) -> Expr:
    if is_number(left):
        left, right = right, left
    if left is right and isinstance(left, Expr):
        return Expr("square", (left,), node)
    return Expr("mul", (left, right), node)


def strip_same(expr: Any) -> Any:
    while isinstance(expr, Expr) and expr.op == "same":
        expr = expr.args[0]
    return expr


def strip_casts(expr: Any) -> Any:
    while isinstance(expr, Expr) and expr.op in ("same", "cast"):
        expr = expr.args[0]
    return expr


def strip_widening(expr: Any) -> Any:
    """Remove casts that lose nothing; a value rounded to fewer bits is a different value."""
    while isinstance(expr, Expr) and expr.op in ("same", "cast"):
        if expr.op == "cast":
            source, target = dtype_of(expr.args[0]), dtype_of(expr)
            if source is None or target is None or torch.promote_types(source, target) != target:
                return expr
        expr = expr.args[0]
    return expr


def packs(expr: Any) -> bool:
    """Return True if an identity changes strides, as `contiguous` does for a transposed tensor."""
    if not isinstance(expr, Expr) or expr.op != "same" or not isinstance(expr.args[0], Expr):
        return False
    before, after = expr.args[0].value, expr.value
    known = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return known and not same_shape(before.stride(), after.stride())


def strip_in_place(expr: Any) -> Any:
    """Like `strip_widening`, but stop at an identity that changes strides: an op reads the value packed."""
    inner = strip_widening(expr)
    while expr is not inner and not packs(expr):
        expr = expr.args[0]
    return expr


def nodes_between(outer: Any, inner: Any) -> set[fx.Node]:
    """Return the nodes of the casts and identities that were stripped from `outer` to get `inner`."""
    nodes = set()
    while outer is not inner:
        if outer.node is not None:
            nodes.add(outer.node)
        outer = outer.args[0]
    return nodes


# Returns the expression of a node, and a number, None or a dtype unchanged.
Of = Callable[[Any], Any]
# Builds the expression of a node, or returns None if the node is opaque.
Build = Callable[[Of, fx.Node], Expr | None]


class Forms:
    """Builders of canonical forms by target, a function or the name of a method: `FORMS` of a module in `canonical`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.builders: dict[Any, Build] = {}

    def builder(self, *targets: Any) -> Callable[[Build], Build]:
        """Declare a function as the builder of some targets."""

        def declare(build: Build) -> Build:
            self.builders |= dict.fromkeys(targets, build)
            return build

        return declare
