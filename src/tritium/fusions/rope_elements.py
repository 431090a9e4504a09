"""Patterns of the elements of a RoPE: the two lanes of a tensor, and signed products.

A lane holds one element of every rotated pair. Models write them as:

    interleaved    x[..., i::2], x.reshape(..., -1, 2).unbind(-1)[i], x.reshape(..., -1, 2)[..., i]
    half           x.chunk(2, -1)[i], x[..., : d // 2], x.reshape(..., 2, -1).unbind(-2)[i]

Functions add the nodes that they read through to `seen`: a site covers these nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx

from tritium.fusions.expression import Expr, nodes_between, shape_of, strip_casts, strip_widening
from tritium.fusions.patterns import ANY, Ends, Found, Matcher, Pattern, all_match, kind
from tritium.graph import same_shape
from tritium.ops.rope import HALF, INTERLEAVED

Seen = set[fx.Node]


class Lane(NamedTuple):
    x: Expr
    mode: str
    place: int


class Selection(NamedTuple):
    """The one dim that an index restricts, and its range; the size is None for half of a symbolic size."""

    dim: int
    start: int
    size: int | None
    step: int

    def is_half_of(self, size: Any) -> bool:
        return self.size is None or (isinstance(size, int) and size == 2 * self.size)


def peeled(expr: Any, seen: Seen) -> Any:
    """Return an expression without casts that lose nothing."""
    inner = strip_widening(expr)
    seen |= nodes_between(expr, inner)
    return inner


def restriction(parts: Any, shape: Sequence[Any]) -> Selection | None:
    """Return the single dim that an index (slices, or their form in `layout`) restricts, or None."""
    parts = list(parts) if isinstance(parts, tuple) else [parts]
    if any(part is None for part in parts):
        return None
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    found = []
    for dim, part in enumerate(parts):
        selected = slice(*part[1:]) if isinstance(part, tuple) and part[:1] == ("slice",) else part
        size = shape[dim]
        if selected == slice(None):
            continue
        if not _is_constant(selected):
            return None
        if isinstance(selected, int) and selected >= 0:
            # Valid for every size: with `dynamic=True`, a table of matrices has a symbolic one.
            found.append(Selection(dim, selected, 1, 1))
            continue
        if not isinstance(size, int):
            if not isinstance(selected, slice) or selected not in (
                slice(0, None, 2),
                slice(None, None, 2),
                slice(1, None, 2),
            ):
                return None
            # Every other element of a symbolic size: still a lane.
            found.append(Selection(dim, selected.start or 0, None, 2))
            continue
        taken = range(size)[selected] if isinstance(selected, slice) else range(selected % size, selected % size + 1)
        found.append(Selection(dim, taken.start, len(taken), taken.step))
    return found[0] if len(found) == 1 else None


def _is_constant(selected: Any) -> bool:
    bounds = (selected.start, selected.stop, selected.step) if isinstance(selected, slice) else (selected,)
    return all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds if bound is not None)


def selection(expr: Expr, seen: Seen) -> Selection | None:
    """Return the part of its operand that an index or a piece selects."""
    shape, taken = shape_of(expr.args[0]) if expr.args else None, shape_of(expr)
    if shape is None or taken is None or expr.node is None or expr.op not in ("index", "piece"):
        return None
    if expr.op == "index":
        found = restriction(expr.attrs, shape)
    else:
        index, kind, dim, _ = expr.attrs
        size = shape[dim]
        found = None
        if isinstance(size, int):
            if kind == "unbind":
                found = Selection(dim, index % size, 1, 1)
            elif size == 2 * taken[dim]:
                found = Selection(dim, index % 2 * taken[dim], taken[dim], 1)
        if found is not None and expr.node.target is operator.getitem:
            # The `chunk` or `unbind` that returns this value.
            seen.add(expr.node.all_input_nodes[0])
    if found is not None:
        seen.add(expr.node)
    return found


def split(expr: Any, *tail: int | None) -> Expr | None:
    """Return x if an expression is `x.reshape(*x.shape[:-1], *tail)`; a None in the tail is any size."""
    whole: Expr | None = expr.args[0] if isinstance(expr, Expr) and expr.op in ("reshape", "view") else None
    shape, parts = shape_of(whole), shape_of(expr)
    if shape is None or parts is None or len(parts) != len(shape) - 1 + len(tail):
        return None
    front, back = parts[: -len(tail)], parts[-len(tail) :]
    wanted = [part if size is None else size for size, part in zip(tail, back, strict=True)]
    # The number of elements equals the size of the split dim; an `expand` has more.
    if not same_shape(back, wanted) or not same_shape(shape, (*front, math.prod(back))):
        return None
    return whole


def _lane_of(expr: Any, seen: Seen) -> Lane | None:
    """Return the lane that an expression is; the dim of a split may be kept with size one."""
    inner = peeled(expr, seen)
    chosen = selection(inner, seen) if isinstance(inner, Expr) else None
    if chosen is None:
        return None
    source = peeled(inner.args[0], seen)
    shape = shape_of(source) or ()
    from_end, size = chosen.dim - len(shape), shape[chosen.dim]
    for tail, dim, mode in (((None, 2), -1, INTERLEAVED), ((2, None), -2, HALF)):
        whole = split(source, *tail) if from_end == dim and chosen.size == 1 else None
        if whole is not None:
            seen.add(source.node)
            return Lane(peeled(whole, seen), mode, chosen.start)
    # Selecting one element drops the dim; a slice keeps it.
    if from_end != -1 or len(shape_of(inner) or ()) != len(shape) or not chosen.is_half_of(size):
        return None
    if chosen.step == 2 and chosen.start in (0, 1):
        return Lane(source, INTERLEAVED, chosen.start)
    if chosen.step == 1 and chosen.size and chosen.start in (0, chosen.size):
        return Lane(source, HALF, chosen.start // chosen.size)
    return None


def _through(read: Callable[[Any, Seen], Any], part: Pattern) -> Matcher:
    """Match a part with what a function reads through an expression, if that is not None."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        seen: Seen = set()
        inner = read(target, seen)
        if inner is not None:
            yield from part.match(inner, replace(found, nodes=found.nodes | seen))

    return match


@kind
def lane(mode: str, place: int, x: Pattern) -> tuple[Matcher, Ends]:
    """Match a lane of x."""

    def read(expr: Any, seen: Seen) -> Any:
        chosen = _lane_of(expr, seen)
        return chosen.x if chosen is not None and chosen[1:] == (mode, place) else None

    return _through(read, x), ANY


@kind
def pairs(x: Pattern, *tail: int | None) -> tuple[Matcher, Ends]:
    """Match x with its last dim split into some dims; None is any size."""

    def read(expr: Any, seen: Seen) -> Any:
        inner = peeled(expr, seen)
        whole = split(inner, *tail)
        if whole is not None:
            seen.add(inner.node)
        return whole

    return _through(read, x), ANY


@kind
def column(place: int, part: Pattern) -> tuple[Matcher, Ends]:
    """Match `y[..., place]`."""

    def read(expr: Any, seen: Seen) -> Any:
        chosen = selection(expr, seen) if isinstance(expr, Expr) else None
        shape = shape_of(expr.args[0]) if chosen is not None else None
        if chosen is None or shape is None or (chosen.dim, chosen.start) != (len(shape) - 1, place):
            return None
        return peeled(expr.args[0], seen) if len(shape_of(expr) or ()) < len(shape) else None

    return _through(read, part), ANY


def _unsigned(expr: Any, strip: Callable[[Any], Any], seen: Seen) -> tuple[int, Any]:
    """Return the sign of an expression, and the expression without negations and what `strip` removes."""
    sign, inner = 1, strip(expr)
    seen |= nodes_between(expr, inner)
    while isinstance(inner, Expr) and inner.op == "neg":
        expr, sign = inner.args[0], -sign
        seen |= {inner.node} if inner.node is not None else set()
        inner = strip(expr)
        seen |= nodes_between(expr, inner)
    return sign, inner


@kind
def signed(sign: int, part: Pattern) -> tuple[Matcher, Ends]:
    """Match a value of a sign, without its negations."""

    def read(expr: Any, seen: Seen) -> Any:
        own, inner = _unsigned(expr, strip_widening, seen)
        return inner if own == sign else None

    return _through(read, part), ANY


@kind
def product(sign: int, left: Pattern, right: Pattern) -> tuple[Matcher, Ends]:
    """Match a product of a sign; it may be rounded, which the replacing op does not do."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        seen: Seen = set()
        total, inner = _unsigned(target, strip_casts, seen)
        if not isinstance(inner, Expr) or inner.op != "mul":
            return
        signs, factors = zip(*(_unsigned(arg, strip_widening, seen) for arg in inner.args), strict=True)
        if total * math.prod(signs) != sign:
            return
        seen |= {inner.node} if inner.node is not None else set()
        for order in (factors, factors[::-1]):
            yield from all_match((left, right), order, replace(found, nodes=found.nodes | seen))

    return match, ANY
