"""Canonical forms of operations that move elements: pieces, slices, joins, reshapes.

    q, k = x.chunk(2, -1); x.split(...); x.unbind(1)   -> piece(x, index, kind, dim, sizes)
    x[..., 0::2], x[:, :n]                             -> index(x, (...))
    x[:, None], x.unsqueeze(1), x.expand(...)          -> view(x)
    (1 + s)[:, None]                                   -> add(view(s), 1)
    torch.stack([a, b], -1), torch.cat([a, b], 1)      -> stack(a, b), cat(a, b)
    x.view(...), x.reshape(...), x.flatten(3)          -> reshape(x); the nodes' values have the shapes
    x.transpose(1, 2), x.permute(...), x.swapaxes(1, 2) -> permute(x, dims)
    torch.view_as_complex(x), torch.view_as_real(x)    -> view_as_complex(x), view_as_real(x)
    torch.empty_like(x), torch.zeros(...)              -> blank(): memory that later writes fill

Dims are counted from the front if the rank is known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tritium.fusions.expression import Expr, Forms, Of, is_number, shape_of, strip_same
from tritium.graph import argument, same_shape, same_size, value_of

_SPLITS = {
    torch.chunk: "chunk",
    "chunk": "chunk",
    torch.split: "split",
    "split": "split",
    "split_with_sizes": "split",
    torch.unbind: "unbind",
    "unbind": "unbind",
    "tensor_split": "tensor_split",
}
_SWAPS = ("transpose", "swapaxes", "swapdims")

FORMS = Forms("movement")


def positive(dim: int, rank: int | None) -> int:
    return dim if dim >= 0 or rank is None else dim + rank


def rank_of(expr: Any) -> int | None:
    shape = shape_of(expr)
    return len(shape) if shape is not None else None


def broadcast_view(operand: Any, node: fx.Node) -> Expr | None:
    """Return a view that only adds dims of size one or repeats them, moved inside `s + 1` for modulations."""
    if not isinstance(operand, Expr):
        return None
    inner = strip_same(operand)
    if inner.op == "add" and is_number(inner.args[1]) and isinstance(inner.args[0], Expr):
        # No node holds the view of s: to use it, apply `node` to s.
        return Expr("add", (Expr("view", (inner.args[0],), attrs=(node,)), inner.args[1]), node)
    return Expr("view", (operand,), node)


@FORMS.builder("unsqueeze", torch.unsqueeze, "expand", "expand_as")
def _view(of: Of, node: fx.Node) -> Expr | None:
    return broadcast_view(of(node.args[0]), node)


@FORMS.builder(*_SPLITS)
def _pieces(of: Of, node: fx.Node) -> Expr | None:
    operand = of(node.args[0])
    if not isinstance(operand, Expr):
        return None
    kind = _SPLITS[node.target]
    dim = argument(node, 1, "dim", 0) if kind == "unbind" else argument(node, 2, "dim", 0)
    how = None if kind == "unbind" else argument(node, 1, "chunks", argument(node, 1, "split_size_or_sections"))
    if not isinstance(dim, int):
        return None
    sizes = tuple(how) if isinstance(how, (tuple, list)) else how
    return Expr("pieces", (operand,), node, attrs=(kind, positive(dim, rank_of(operand)), sizes))


@FORMS.builder(operator.getitem)
def _getitem(of: Of, node: fx.Node) -> Expr | None:
    operand, index = of(node.args[0]), node.args[1]
    if not isinstance(operand, Expr):
        return None
    if operand.op == "pieces":
        return Expr("piece", operand.args, node, attrs=(index, *operand.attrs)) if isinstance(index, int) else None
    if not isinstance(value_of(node), torch.Tensor):
        return None
    parts = index if isinstance(index, tuple) else (index,)
    if all(part is None or part is Ellipsis or part == slice(None) for part in parts):
        return broadcast_view(operand, node)
    if any(isinstance(part, (fx.Node, torch.Tensor)) for part in parts):
        return None
    return Expr("index", (operand,), node, attrs=tuple(map(_frozen, parts)))


def _frozen(part: Any) -> Any:
    """Return a hashable form: before Python 3.12 slices are not; symbolic bounds compare by identity."""
    return ("slice", part.start, part.stop, part.step) if isinstance(part, slice) else part


@FORMS.builder(torch.select, "select")
def _select(of: Of, node: fx.Node) -> Expr | None:
    operand, dim, index = of(node.args[0]), argument(node, 1, "dim"), argument(node, 2, "index")
    if not isinstance(dim, int) or not isinstance(index, int):
        return None
    return Expr("piece", (operand,), node, attrs=(index, "unbind", positive(dim, rank_of(operand)), None))


@FORMS.builder(torch.cat, torch.concat, torch.stack)
def _joined(of: Of, node: fx.Node) -> Expr | None:
    parts, dim = node.args[0], argument(node, 1, "dim", 0)
    if not isinstance(parts, (tuple, list)) or not isinstance(dim, int):
        return None
    name = "stack" if node.target is torch.stack else "cat"
    value = value_of(node)
    rank = value.dim() if isinstance(value, torch.Tensor) else None
    joined = Expr(name, tuple(of(part) for part in parts), node, attrs=(positive(dim, rank),))
    whole = _put_together_again(joined) if name == "cat" else None
    return joined if whole is None else Expr("same", (whole,), node)


def _put_together_again(joined: Expr) -> Expr | None:
    """Return the tensor whose slices, all in order, a concatenation joins, as between FLUX blocks."""
    (dim,), whole, end = joined.attrs, None, 0
    for part in joined.args:
        inner = strip_same(part)
        bounds = _slice_along(inner, dim) if isinstance(inner, Expr) else None
        if bounds is None or (bounds[0] is not end and bounds[0] != end):
            return None
        source = inner.args[0]
        if whole is not None and source is not whole:
            return None
        whole, end = source, bounds[1]
    known = shape_of(whole)
    if known is None or not (end is None or same_size(end, known[dim])):
        return None
    return whole if same_shape(known, shape_of(joined)) else None


def _slice_along(expr: Expr, dim: int) -> tuple[Any, Any] | None:
    """Return start and stop of a slice of one dim; a stop of None is the end."""
    if expr.op != "index" or len(expr.attrs) <= dim or Ellipsis in expr.attrs:
        return None
    if any(attr != ("slice", None, None, None) for place, attr in enumerate(expr.attrs) if place != dim):
        return None
    chosen = expr.attrs[dim]
    if not isinstance(chosen, tuple) or chosen[3] not in (None, 1):
        return None
    start, stop = chosen[1] or 0, chosen[2]
    # A bound counted from the end depends on the size.
    return None if any(isinstance(bound, int) and bound < 0 for bound in (start, stop)) else (start, stop)


def _without_ones(shape: torch.Size) -> list[Any]:
    return [size for size in shape if not same_size(size, 1)]


@FORMS.builder(
    "view", "reshape", torch.reshape, "flatten", torch.flatten, "unflatten", torch.unflatten, "squeeze", torch.squeeze
)
def _reshape(of: Of, node: fx.Node) -> Expr | None:
    operand = of(node.args[0])
    before, after = shape_of(operand), value_of(node)
    if not isinstance(operand, Expr) or (after is not None and not isinstance(after, torch.Tensor)):
        return None
    if before is not None and after is not None:
        if operand.value.dtype != after.dtype:
            # `x.view(dtype)` reinterprets the bits.
            return None
        if same_shape(before, after.shape):
            return Expr("same", (operand,), node)
        if same_shape(_without_ones(before), _without_ones(after.shape)):
            return broadcast_view(operand, node)
    return Expr("reshape", (operand,), node)


@FORMS.builder("permute", torch.permute, *(place for name in _SWAPS for place in (name, getattr(torch, name))))
def _permute(of: Of, node: fx.Node) -> Expr | None:
    operand = of(node.args[0])
    rank = rank_of(operand)
    dims: Any = (*node.args[1:], *node.kwargs.values())
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = dims[0]
    if rank is None or not all(isinstance(dim, int) for dim in dims):
        return None
    order = [positive(dim, rank) for dim in dims]
    if node.target not in ("permute", torch.permute):
        first, second = order
        order = list(range(rank))
        order[first], order[second] = second, first
    return Expr("permute", (operand,), node, attrs=tuple(order))


@FORMS.builder(torch.view_as_complex, torch.view_as_real)
def _complex_view(of: Of, node: fx.Node) -> Expr | None:
    operand = of(node.args[0])
    name = "view_as_real" if node.target is torch.view_as_real else "view_as_complex"
    return Expr(name, (operand,), node) if isinstance(operand, Expr) else None


@FORMS.builder(torch.empty_like, torch.zeros_like, torch.empty, torch.zeros, "new_empty", "new_zeros")
def _blank(of: Of, node: fx.Node) -> Expr | None:
    """Return `blank()` without operands: the arguments only give its shape."""
    del of
    return Expr("blank", (), node) if isinstance(value_of(node), torch.Tensor) else None
