"""Build a canonical expression DAG for an FX graph: one form for all spellings of the same arithmetic.

The graph is not rewritten. Every node gets an `Expr`; nodes that differ only in spelling disappear:

    a.mul(b), a * b, torch.mul(a, b)            -> mul(a, b)
    a - b                                       -> add(a, neg(b))
    x.pow(2), x ** 2, x.square(), x * x         -> square(x)
    a / torch.sqrt(b), a * b ** -0.5            -> mul(a, rsqrt(b))
    F.rms_norm(x, (d,), w, eps)                 -> mul(mul(x, rsqrt(add(mean(square(x)), eps))), w)
    x.to(dtype), x.float(), x.type_as(y)        -> cast(x), which matching ignores
    x.contiguous(), x * 1, dropout in eval      -> x
    x[:, None], x.unsqueeze(1), x.expand(...)   -> view(x)
    (1 + s)[:, None]                            -> add(view(s), 1)
    torch.addcmul(a, b, c)                      -> add(a, mul(b, c))

`canonical/movement.py` adds the forms that move elements, `canonical/operators.py` whole operators (norms, activations, linear).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium.graph import argument, same_shape, value_of


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
    value = expr.value if isinstance(expr, Expr) else None
    return value.shape if isinstance(value, torch.Tensor) else None


Build = Callable[["Canonicaliser", fx.Node], Expr | None]

# Target (a function or a method name) -> builder of its expression. A builder returns None for an opaque node.
_BUILDERS: dict[Any, Build] = {}


def builder(*targets: Any) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        for target in targets:
            _BUILDERS[target] = build
        return build

    return register


class Canonicaliser:
    """Build expressions for the nodes of one graph, on demand and once each."""

    def __init__(self) -> None:
        self._exprs: dict[fx.Node, Expr] = {}

    def of(self, thing: Any) -> Any:
        """Return the expression of a node; return numbers, None and dtypes unchanged."""
        if not isinstance(thing, fx.Node):
            return thing
        # Graphs are thousands of nodes deep: build arguments from a stack instead of by recursion.
        stack = [thing]
        while stack:
            node = stack[-1]
            if node in self._exprs:
                stack.pop()
                continue
            missing = [arg for arg in node.all_input_nodes if arg not in self._exprs]
            if missing:
                stack.extend(missing)
                continue
            self._exprs[node] = self._build(node)
            stack.pop()
        return self._exprs[thing]

    def _build(self, node: fx.Node) -> Expr:
        if node.op in ("call_function", "call_method"):
            build = _BUILDERS.get(node.target)
            if build is not None:
                made = build(self, node)
                if made is not None:
                    return made
        return Expr("opaque", node=node)


def is_number(thing: Any) -> bool:
    return isinstance(thing, (int, float)) and not isinstance(thing, bool)


def is_scalar(thing: Any) -> bool:
    """Return True for a number, or a value of the graph that is a number."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return is_number(thing) or (isinstance(thing, Expr) and isinstance(thing.value, numbers))


def _is_tensor(thing: Any) -> bool:
    """Return True if an operand is a tensor; every node of a traced pattern, which has no values, is one."""
    if not isinstance(thing, Expr):
        return False
    return thing.node is None or thing.value is None or isinstance(thing.value, torch.Tensor)


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


def neg(operand: Any) -> Any:
    return -operand if is_number(operand) else Expr("neg", (operand,))


def _keeps(expr: Any, node: fx.Node) -> bool:
    """Return True if a node that spells an identity has its operand's dtype and shape."""
    known = isinstance(expr, Expr) and isinstance(expr.value, torch.Tensor)
    result = value_of(node)
    if not known or not isinstance(result, torch.Tensor):
        return True
    return expr.value.dtype == result.dtype and same_shape(expr.value.shape, result.shape)


def _alias(operand: Expr, node: fx.Node) -> Expr:
    """Return `operand` as held by `node`: rewriting needs the nodes that a match covers."""
    return Expr("same", (operand,), node)


@builder(operator.add, torch.add, "add")
def _add(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    left, right = (canon.of(arg) for arg in node.args[:2]) if len(node.args) >= 2 else (None, None)
    if left is None or node.kwargs.get("alpha", 1) != 1 or not (_is_tensor(left) or _is_tensor(right)):
        return None
    return add(left, right, node)


@builder(operator.sub, torch.sub, "sub")
def _sub(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    left, right = (canon.of(arg) for arg in node.args[:2]) if len(node.args) >= 2 else (None, None)
    if left is None or node.kwargs.get("alpha", 1) != 1 or not (_is_tensor(left) or _is_tensor(right)):
        return None
    return add(left, neg(right), node)


@builder(operator.mul, torch.mul, "mul", torch.multiply, "multiply")
def _mul(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    if len(node.args) != 2:
        return None
    left, right = (canon.of(arg) for arg in node.args)
    if not (_is_tensor(left) or _is_tensor(right)):
        return None
    for one, other in ((left, right), (right, left)):
        if is_number(one) and one == 1 and _keeps(other, node):
            return _alias(other, node)
    return mul(left, right, node)


@builder(operator.truediv, torch.div, "div", torch.true_divide, "true_divide")
def _div(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    if len(node.args) != 2 or node.kwargs.get("rounding_mode") is not None:
        return None
    left, right = (canon.of(arg) for arg in node.args)
    if is_number(right) and right == 1 and _keeps(left, node):
        return _alias(left, node)
    denominator = strip_same(right)
    if isinstance(denominator, Expr) and denominator.op == "sqrt":
        root = Expr("rsqrt", denominator.args, denominator.node)
        return mul(left, root, node)
    return Expr("div", (left, right), node)


@builder(operator.neg, torch.neg, "neg")
def _neg(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    return Expr("neg", (canon.of(node.args[0]),), node)


@builder(torch.square, "square")
def _square(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    return Expr("square", (canon.of(node.args[0]),), node)


@builder(operator.pow, torch.pow, "pow", "__pow__")
def _pow(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    base, exponent = canon.of(node.args[0]), argument(node, 1, "exponent")
    forms = {2: "square", -0.5: "rsqrt", 0.5: "sqrt"}
    if not isinstance(base, Expr) or not is_number(exponent) or exponent not in forms:
        return None
    return Expr(forms[exponent], (base,), node)


@builder(torch.rsqrt, "rsqrt")
def _rsqrt(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    return Expr("rsqrt", (canon.of(node.args[0]),), node)


@builder(torch.sqrt, "sqrt")
def _sqrt(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    return Expr("sqrt", (canon.of(node.args[0]),), node)


@builder(torch.mean, "mean")
def _mean(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    """Accept only a mean over the last dim that keeps it, as in norms."""
    operand = canon.of(node.args[0])
    dim, keepdim = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (tuple, list)) else []
    shape = shape_of(operand)
    rank = len(shape) if shape is not None else None
    last = [-1] if rank is None else [-1, rank - 1]
    if keepdim is not True or len(dims) != 1 or dims[0] not in last or node.kwargs.get("dtype") is not None:
        return None
    return Expr("mean", (operand,), node, attrs=(-1,))


def _cast(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    """Accept only a change of dtype; a move to another device or memory format stays opaque."""
    operand = canon.of(node.args[0])
    result = value_of(node)
    known = isinstance(operand, Expr) and isinstance(operand.value, torch.Tensor)
    if not known or not isinstance(result, torch.Tensor):
        return Expr("cast", (operand,), node)
    if operand.value.device != result.device or not same_shape(operand.value.shape, result.shape):
        return None
    if operand.value.dtype == result.dtype:
        return _alias(operand, node)
    floating = operand.value.dtype.is_floating_point and result.dtype.is_floating_point
    return Expr("cast", (operand,), node) if floating else None


for _target in ("to", "type_as", "float", "half", "bfloat16", "double", "type"):
    _BUILDERS[_target] = _cast


@builder("contiguous", "detach", torch.clone, "clone")
def _identity(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    operand = canon.of(node.args[0])
    return _alias(operand, node) if isinstance(operand, Expr) and _keeps(operand, node) else None


@builder(F.dropout, torch.dropout)
def _dropout(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    if argument(node, 1, "p", 0.5) != 0 and argument(node, 2, "training", True) is not False:
        return None
    return _alias(canon.of(node.args[0]), node)


@builder(torch.addcmul, "addcmul")
def _addcmul(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    if len(node.args) != 3 or node.kwargs.get("value", 1) != 1:
        return None
    addend, left, right = (canon.of(arg) for arg in node.args)
    return add(addend, mul(left, right), node)


def broadcast_view(operand: Any, node: fx.Node) -> Expr | None:
    """Return a view that only adds dims of size one or repeats them, moved inside `s + 1` for modulations."""
    if not isinstance(operand, Expr):
        return None
    inner = strip_same(operand)
    if inner.op == "add" and is_number(inner.args[1]) and isinstance(inner.args[0], Expr):
        # No node holds the view of s: to use it, apply `node` to s.
        return Expr("add", (Expr("view", (inner.args[0],), attrs=(node,)), inner.args[1]), node)
    return Expr("view", (operand,), node)


@builder("unsqueeze", torch.unsqueeze, "expand", "expand_as")
def _view(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    return broadcast_view(canon.of(node.args[0]), node)


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
