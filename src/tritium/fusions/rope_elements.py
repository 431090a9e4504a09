"""Match the elements of a RoPE: the two lanes of a tensor, signed products with tables, and rotations.

A lane holds one element of every rotated pair. Models write them as:

    interleaved    x[..., i::2], x.reshape(..., -1, 2).unbind(-1)[i], x.reshape(..., -1, 2)[..., i]
    half           x.chunk(2, -1)[i], x[..., : d // 2], x.reshape(..., 2, -1).unbind(-2)[i]

Every function adds the nodes that it reads through to `seen`: a site covers these nodes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from tritium.fusions.expression import Expr, dtype_of, nodes_between, shape_of, strip_casts, strip_widening
from tritium.fusions.patterns import same_value
from tritium.graph import same_shape
from tritium.ops.rope import COMPLEX, HALF, INTERLEAVED, MATRIX

Seen = set[fx.Node]

# These are equal if their operands are: two `freqs[..., 0]` of one tensor are one table.
MOVES = frozenset({"index", "piece", "view", "reshape", "permute"})


@dataclass(frozen=True)
class Rotation:
    """x rotated by a table, and by sines if the table has only the cosines."""

    mode: str
    x: Expr
    table: Expr
    sin: Expr | None = None


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


class Product(NamedTuple):
    sign: int
    factors: tuple[Expr, Expr]


def passed(outer: Any, inner: Any, seen: Seen) -> Any:
    """Return `inner`, and add the casts and identities above it to `seen`."""
    seen |= nodes_between(outer, inner)
    return inner


def peeled(expr: Any, seen: Seen) -> Any:
    """Return an expression without casts that lose nothing."""
    return passed(expr, strip_widening(expr), seen)


def is_tensor(expr: Any) -> bool:
    """Return True if an expression is a floating-point or complex tensor."""
    dtype = dtype_of(expr)
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def equal(left: Any, right: Any) -> bool:
    """Return True if two expressions are one value, or the same view of one value."""
    left, right = strip_widening(left), strip_widening(right)
    if same_value(left, right):
        return True
    if not isinstance(left, Expr) or not isinstance(right, Expr) or left.op != right.op or left.op not in MOVES:
        return False
    if (
        left.attrs != right.attrs
        or dtype_of(left) != dtype_of(right)
        or not same_shape(shape_of(left), shape_of(right))
    ):
        return False
    if left.op == "piece" and left.attrs[0] == "split":
        # The expression does not contain the sizes of earlier pieces.
        return False
    return all(equal(one, two) for one, two in zip(left.args, right.args, strict=True))


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
        kind, dim, index = expr.attrs
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


def lane(expr: Any, seen: Seen) -> Lane | None:
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


def signed(expr: Any, seen: Seen) -> tuple[int, Any]:
    """Return the sign of an expression, and the expression without negations and lossless casts."""
    sign, inner = 1, peeled(expr, seen)
    while isinstance(inner, Expr) and inner.op == "neg":
        if inner.node is not None:
            seen.add(inner.node)
        sign, inner = -sign, peeled(inner.args[0], seen)
    return sign, inner


def product(expr: Any, seen: Seen) -> Product | None:
    """Match a signed product of two tensors; it may be rounded, which the replacing op does not do."""
    sign, inner = 1, passed(expr, strip_casts(expr), seen)
    while isinstance(inner, Expr) and inner.op in ("neg", "mul"):
        if inner.node is not None:
            seen.add(inner.node)
        if inner.op == "mul":
            signs, factors = zip(*(signed(arg, seen) for arg in inner.args), strict=True)
            if not all(is_tensor(factor) for factor in factors):
                return None
            return Product(sign * signs[0] * signs[1], factors)
        sign, inner = -sign, passed(inner.args[0], strip_casts(inner.args[0]), seen)
    return None


def products(expr: Any, seen: Seen) -> tuple[Product, Product] | None:
    """Return the two terms of a sum of products."""
    inner = passed(expr, strip_casts(expr), seen)
    if not isinstance(inner, Expr) or inner.op != "add":
        return None
    if inner.node is not None:
        seen.add(inner.node)
    left, right = (product(arg, seen) for arg in inner.args)
    return (left, right) if left is not None and right is not None else None


def turned(expr: Any, seen: Seen) -> tuple[int, Lane] | None:
    """Match `stack(-x_odd, x_even)` flattened or `cat(-x2, x1)`; return the sign and lane 0 of x.

    The sign is -1 if both signs are the opposite of these.
    """
    joined, mode = expr, HALF
    if expr.op in ("reshape", "view"):
        joined, mode = peeled(expr.args[0], seen), INTERLEAVED
    if (
        not isinstance(joined, Expr)
        or joined.op != ("stack" if mode == INTERLEAVED else "cat")
        or len(joined.args) != 2
    ):
        return None
    shape, parts = shape_of(expr), shape_of(joined)
    if shape is None or parts is None or joined.attrs[0] != len(parts) - 1:
        return None
    if mode == INTERLEAVED and not same_shape(shape, (*parts[:-2], 2 * parts[-2])):
        return None
    seen.update(node for node in (expr.node, joined.node) if node is not None)
    (sign, first), (other, second) = (signed(arg, seen) for arg in joined.args)
    high, low = lane(first, seen), lane(second, seen)
    if high is None or low is None or sign == other or (low.place, high.place) != (0, 1):
        return None
    if not (low.mode == high.mode == mode) or not equal(low.x, high.x):
        return None
    return other, low


def rotation(expr: Expr, seen: Seen) -> Rotation | None:
    """Match `x * cos + turned(x) * sin`."""
    terms = products(expr, seen)
    if terms is None:
        return None
    for (straight, across), (x, cos), (other, sin) in _orders(terms):
        trail: Seen = set()
        found = turned(other, trail)
        if found is None or straight.sign != 1 or across.sign * found[0] != 1 or not equal(found[1].x, x):
            continue
        if not same_shape(shape_of(found[1].x), shape_of(other)):
            continue
        seen |= trail
        return Rotation(found[1].mode, x, cos, sin)
    return None


def _orders(terms: tuple[Product, Product]) -> Iterator[tuple[tuple[Product, Product], Any, Any]]:
    """Yield every order of two products and of the factors of each."""
    for first, second in (terms, terms[::-1]):
        for left, right in itertools.product((1, -1), repeat=2):
            yield (first, second), first.factors[::left], second.factors[::right]


def _turns(expr: Any, index: int, seen: Seen) -> Iterator[tuple[Lane, Expr, Expr]]:
    """Yield the ways to read a sum as result lane `index`: lane `index` of x, the cosines and the sines."""
    terms = products(expr, seen)
    shape = shape_of(expr)
    if terms is None:
        return
    for (straight, across), (own, cos), (other, sin) in _orders(terms):
        if straight.sign != 1 or across.sign != (-1, 1)[index]:
            continue
        trail: Seen = set()
        here, there = lane(own, trail), lane(other, trail)
        if here is None or there is None or (here.place, there.place) != (index, 1 - index):
            continue
        if here.mode != there.mode or not equal(here.x, there.x) or not same_shape(shape_of(own), shape):
            continue
        if len(shape_of(here.x) or ()) != len(shape or ()):
            continue
        seen |= trail
        yield here, cos, sin


def lane_rotation(first: Any, second: Any, seen: Seen) -> Rotation | None:
    """Match `a * cos - b * sin` and `a * sin + b * cos` of the lanes a and b of one tensor."""
    for (one, cos, sin), (two, other_cos, other_sin) in itertools.product(
        list(_turns(first, 0, seen)), list(_turns(second, 1, seen))
    ):
        if one.mode == two.mode and equal(one.x, two.x) and equal(cos, other_cos) and equal(sin, other_sin):
            return Rotation(one.mode, one.x, cos, sin)
    return None


def complex_rotation(expr: Any, seen: Seen) -> Rotation | None:
    """Match `view_as_complex(x in pairs) * freqs`."""
    if not isinstance(expr, Expr) or expr.op != "mul":
        return None
    for left, right in (expr.args, expr.args[::-1]):
        trail: Seen = set()
        number = peeled(left, trail)
        if not isinstance(number, Expr) or number.op != "view_as_complex":
            continue
        pairs = peeled(number.args[0], trail)
        x = split(pairs, None, 2)
        dtype = dtype_of(right)
        if x is None or dtype is None or not dtype.is_complex or not same_shape(shape_of(number), shape_of(expr)):
            continue
        seen |= trail | {node for node in (expr.node, number.node, pairs.node) if node is not None}
        return Rotation(COMPLEX, peeled(x, seen), peeled(right, seen))
    return None


def matrix_rotation(expr: Expr, seen: Seen) -> Rotation | None:
    """Match `f[..., 0] * x_[..., 0] + f[..., 1] * x_[..., 1]` or `(f * x_).sum(-1)`.

    x_ is x as [..., d / 2, 1, 2].
    """
    if expr.op == "sum":
        term = product(expr.args[0], seen)
        last = len(shape_of(expr) or ())
        if term is None or term.sign != 1 or expr.attrs != (last,):
            return None
        return _by_matrices(term.factors, seen) or _by_matrices(term.factors[::-1], seen)
    terms = products(expr, seen)
    if terms is None or any(term.sign != 1 for term in terms):
        return None
    for _, first, second in _orders(terms):
        trail: Seen = set()
        columns = [(_column(factors[0], trail), _column(factors[1], trail)) for factors in (first, second)]
        (left, left_x), (right, right_x) = columns
        if left is None or left_x is None or right is None or right_x is None:
            continue
        if (left[1], left_x[1], right[1], right_x[1]) != (0, 0, 1, 1):
            continue
        if equal(left[0], right[0]) and equal(left_x[0], right_x[0]):
            found = _by_matrices((left[0], left_x[0]), trail)
            if found is not None:
                seen |= trail
                return found
    return None


def _column(expr: Any, seen: Seen) -> tuple[Any, int] | None:
    """Return (y, i) if an expression is `y[..., i]`."""
    chosen = selection(expr, seen) if isinstance(expr, Expr) else None
    shape = shape_of(expr.args[0]) if chosen is not None else None
    if chosen is None or shape is None or chosen.dim != len(shape) - 1 or len(shape_of(expr) or ()) == len(shape):
        return None
    return peeled(expr.args[0], seen), chosen.start


def _by_matrices(factors: tuple[Any, Any], seen: Seen) -> Rotation | None:
    table, column = factors
    x, shape = split(column, None, 1, 2), shape_of(table)
    if x is None or shape is None or len(shape) < 3 or tuple(shape[-2:]) != (2, 2):
        return None
    seen.add(column.node)
    return Rotation(MATRIX, peeled(x, seen), table)
