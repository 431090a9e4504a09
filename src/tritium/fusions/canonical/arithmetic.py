"""Canonical forms of arithmetic.

a.mul(b), a * b, torch.mul(a, b)            -> mul(a, b)
a - b                                       -> add(a, neg(b))
x.pow(2), x ** 2, x.square(), x * x         -> square(x)
a / torch.sqrt(b), a * b ** -0.5            -> mul(a, rsqrt(b))
x.to(dtype), x.float(), x.type_as(y)        -> cast(x), which matching ignores
x.contiguous(), x * 1, dropout in eval      -> x
F.silu(x)                                   -> silu(x)
torch.addcmul(a, b, c)                      -> add(a, mul(b, c))
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium.fusions.expression import Build, Expr, Forms, Of, add, is_number, mul, shape_of, strip_same
from tritium.graph import argument, same_shape, value_of

FORMS = Forms("arithmetic")


def _is_tensor(thing: Any) -> bool:
    """Return True if an operand is a tensor; every node of a traced pattern, which has no values, is one."""
    if not isinstance(thing, Expr):
        return False
    return thing.node is None or thing.value is None or isinstance(thing.value, torch.Tensor)


def _operands(of: Of, node: fx.Node) -> tuple[Any, Any] | None:
    """Return two operands of which one is a tensor."""
    if len(node.args) != 2:
        return None
    left, right = map(of, node.args)
    return (left, right) if _is_tensor(left) or _is_tensor(right) else None


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


@FORMS.builder(operator.add, torch.add, "add", operator.sub, torch.sub, "sub")
def _add(of: Of, node: fx.Node) -> Expr | None:
    operands = _operands(of, node)
    if operands is None or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = operands
    if node.target in (operator.sub, torch.sub, "sub"):
        right = -right if is_number(right) else Expr("neg", (right,))
    return add(left, right, node)


@FORMS.builder(operator.mul, torch.mul, "mul", torch.multiply, "multiply")
def _mul(of: Of, node: fx.Node) -> Expr | None:
    operands = _operands(of, node)
    if operands is None:
        return None
    left, right = operands
    for one, other in ((left, right), (right, left)):
        if is_number(one) and one == 1 and _keeps(other, node):
            return _alias(other, node)
    return mul(left, right, node)


@FORMS.builder(operator.truediv, torch.div, "div", torch.true_divide, "true_divide")
def _div(of: Of, node: fx.Node) -> Expr | None:
    if len(node.args) != 2 or node.kwargs.get("rounding_mode") is not None:
        return None
    left, right = map(of, node.args)
    if is_number(right) and right == 1 and _keeps(left, node):
        return _alias(left, node)
    denominator = strip_same(right)
    if isinstance(denominator, Expr) and denominator.op == "sqrt":
        return mul(left, Expr("rsqrt", denominator.args, denominator.node), node)
    return Expr("div", (left, right), node)


@FORMS.builder(operator.pow, torch.pow, "pow", "__pow__")
def _pow(of: Of, node: fx.Node) -> Expr | None:
    base, exponent = of(node.args[0]), argument(node, 1, "exponent")
    forms = {2: "square", -0.5: "rsqrt", 0.5: "sqrt"}
    known = isinstance(base, Expr) and is_number(exponent) and exponent in forms
    return Expr(forms[exponent], (base,), node) if known else None


def _unary(name: str) -> Build:
    def build(of: Of, node: fx.Node) -> Expr | None:
        # An in-place activation writes to its operand: its result is not a new value.
        in_place = node.kwargs.get("inplace") or argument(node, 1, "inplace", default=False) is True
        return None if in_place else Expr(name, (of(node.args[0]),), node)

    return build


for _name, _targets in {
    "neg": (operator.neg, torch.neg, "neg"),
    "square": (torch.square, "square"),
    "sqrt": (torch.sqrt, "sqrt"),
    "rsqrt": (torch.rsqrt, "rsqrt"),
    "silu": (F.silu, "silu"),
}.items():
    FORMS.builder(*_targets)(_unary(_name))


@FORMS.builder(torch.mean, "mean")
def _mean(of: Of, node: fx.Node) -> Expr | None:
    """Accept only a mean over the last dim that keeps it, as in norms."""
    operand = of(node.args[0])
    dim, keepdim = argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (tuple, list)) else []
    shape = shape_of(operand)
    rank = len(shape) if shape is not None else None
    last = [-1] if rank is None else [-1, rank - 1]
    if keepdim is not True or len(dims) != 1 or dims[0] not in last or node.kwargs.get("dtype") is not None:
        return None
    return Expr("mean", (operand,), node, attrs=(-1,))


@FORMS.builder("to", "type_as", "float", "half", "bfloat16", "double", "type")
def _cast(of: Of, node: fx.Node) -> Expr | None:
    """Accept only a change of dtype; a move to another device or memory format stays opaque."""
    operand = of(node.args[0])
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


@FORMS.builder("contiguous", "detach", torch.clone, "clone")
def _identity(of: Of, node: fx.Node) -> Expr | None:
    operand = of(node.args[0])
    return _alias(operand, node) if isinstance(operand, Expr) and _keeps(operand, node) else None


@FORMS.builder(F.dropout, torch.dropout)
def _dropout(of: Of, node: fx.Node) -> Expr | None:
    if argument(node, 1, "p", 0.5) != 0 and argument(node, 2, "training", True) is not False:
        return None
    return _alias(of(node.args[0]), node)


@FORMS.builder(torch.addcmul, "addcmul")
def _addcmul(of: Of, node: fx.Node) -> Expr | None:
    if len(node.args) != 3 or node.kwargs.get("value", 1) != 1:
        return None
    addend, left, right = (of(arg) for arg in node.args)
    return add(addend, mul(left, right), node)
