"""Fuse a rotary position embedding, in any of the forms that models use, into `tritium::rope`.

Before:  mul(x, cos) + mul(flatten(stack(-x_odd, x_even)), sin)        or with cat(-x2, x1)
         view_as_real(mul(view_as_complex(x), freqs))                  complex tables
         stack(x_even * cos - x_odd * sin, x_even * sin + x_odd * cos)
         out[..., 0::2] = x1 * cos - x2 * sin; out[..., 1::2] = x1 * sin + x2 * cos
         sum(mul(matrices, x), -1)                                     2 x 2 matrices, also as two products
         out = x * cos; out1.addcmul_(-sin, x2); out2.addcmul_(sin, x1)
After:   tritium::rope(x, cos, sin, mode)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.fusions.rope_elements import (
    Lane,
    Rotation,
    Seen,
    complex_rotation,
    equal,
    lane,
    lane_rotation,
    matrix_rotation,
    peeled,
    product,
    restriction,
    rotation,
    selection,
    split,
)
from tritium.graph import same_shape, storages, value_of
from tritium.ops import rope
from tritium.ops.rope import HALF, INTERLEAVED

ALIASED = "memory that is rotated in place is read or written elsewhere too"
NO_TABLE = "the tables have a dim for the pair, and no value of the graph is without it"


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a rotation in which x, tables, halves and signs agree in all four products."""
    expr = recogniser.canon.of(node)
    form = FORMS.get(expr.op)
    return form(recogniser, node, expr) if form is not None else None


def _value(recogniser: Recogniser, node: fx.Node, expr: Expr) -> Match | None:
    """Match the forms that return a new value."""
    seen: Seen = {node}
    found = _rotation(expr, seen)
    if found is None or not _floats(found.x):
        return None
    return _finished(recogniser, Match(node, _bindings(found), seen), found.x)


def _rotation(expr: Expr, seen: Seen) -> Rotation | None:
    last = len(shape_of(expr) or ()) - 1
    match expr.op:
        case "add":
            return rotation(expr, seen) or matrix_rotation(expr, seen)
        case "sum":
            return matrix_rotation(expr, seen)
        case "view_as_real":
            return complex_rotation(peeled(expr.args[0], seen), seen)
        case "stack" | "cat" if len(expr.args) == 2 and expr.attrs == (last,):
            found = lane_rotation(*expr.args, seen)
            mode = INTERLEAVED if expr.op == "stack" else HALF
            return found if found is not None and found.mode == mode else None
    return None


def _floats(x: Expr) -> bool:
    dtype = dtype_of(x)
    return x.node is not None and dtype is not None and dtype.is_floating_point


def _bindings(found: Rotation) -> dict[str, Any]:
    return {"x": found.x, "table": found.table, "sin": found.sin, "mode": found.mode}


def _finished(recogniser: Recogniser, match: Match, x: Expr) -> Match:
    """Extend a match over merged lanes, merged heads and rounding; separate unshared from shared nodes."""
    root, seen, shape = match.root, set(match.nodes), shape_of(x) or ()
    merged, end, passed = False, match.root, set()
    while (user := _only_user(recogniser, end, seen)) is not None:
        op, source, target = recogniser.canon.of(user).op, value_of(end), value_of(user)
        joins = op in ("reshape", "view") and same_shape(target.shape, shape) and not same_shape(source.shape, shape)
        rounds = op == "cast" and torch.promote_types(source.dtype, target.dtype) == source.dtype
        packs = op == "same" and not match.writes and target.is_contiguous() and not source.is_contiguous()
        heads = _merged_heads(recogniser, user, source, shape) if op == "permute" else None
        end = user if heads is None else heads
        passed |= {user, end}
        if joins or rounds or packs or heads is not None:
            root, seen, passed, merged = end, seen | passed, set(), merged or heads is not None
        elif op != "same":
            # Include an identity only with a node after it: other fusions look through it, at the value before.
            break
    # Nodes that only move or round may serve other sites; arithmetic belongs to this site alone.
    own = {node for node in seen if recogniser.canon.of(node).op in ARITHMETIC} | {match.root, root}
    bindings = {**match.bindings, "merge_heads": merged}
    return Match(root, bindings, own, (seen | match.inner) - own, match.writes)


ARITHMETIC = frozenset({"add", "mul", "sum", "stack", "cat", "view_as_real", "blank"})


def _only_user(recogniser: Recogniser, node: fx.Node, seen: Seen) -> fx.Node | None:
    users = [user for user in node.users if user not in seen]
    if len(users) != 1 or users[0] not in recogniser.live or not isinstance(value_of(users[0]), torch.Tensor):
        return None
    # A cast outside an autocast region rounds another value than one inside.
    return users[0] if recogniser.region[users[0]] == recogniser.region[node] else None


def _merged_heads(recogniser: Recogniser, user: fx.Node, source: torch.Tensor, shape: Any) -> fx.Node | None:
    """Return the last node of `x.transpose(1, 2).reshape(b, s, -1)` if `user` is its transpose."""
    if len(shape) != 4 or not same_shape(source.shape, shape) or recogniser.canon.of(user).attrs != (0, 2, 1, 3):
        return None
    flat = _only_user(recogniser, user, set())
    if flat is None or recogniser.canon.of(flat).op not in ("reshape", "view"):
        return None
    batch, heads, tokens, width = shape
    return flat if same_shape(value_of(flat).shape, (batch, tokens, heads * width)) else None


def _strided_writes(recogniser: Recogniser, node: fx.Node, expr: Expr) -> Match | None:
    """Match an empty tensor that is filled by two writes, one per lane."""
    del expr
    position = recogniser.position
    users = sorted(node.users, key=lambda user: position[user])
    writes = [user for user in users if user.target is operator.setitem and user.args[0] is node][:2]
    if len(writes) < 2 or not any(user in recogniser.live for user in users if user not in writes):
        return None
    out, values = value_of(node), {}
    for write in writes:
        chosen = restriction(write.args[1], out.shape)
        if chosen is None or chosen.dim != out.dim() - 1 or not chosen.is_half_of(out.shape[-1]):
            return None
        if chosen.step == 2 and chosen.start in (0, 1):
            values[INTERLEAVED, chosen.start] = write.args[2]
        elif chosen.step == 1 and chosen.size and chosen.start in (0, chosen.size):
            values[HALF, chosen.start // chosen.size] = write.args[2]
    for mode in (INTERLEAVED, HALF):
        if {(mode, 0), (mode, 1)} != set(values):
            continue
        seen: Seen = {node, *writes}
        first, second = (recogniser.canon.of(values[mode, place]) for place in (0, 1))
        found = lane_rotation(first, second, seen)
        if found is not None and found.mode == mode and _floats(found.x):
            bindings = {**_bindings(found), "merge_heads": False}
            return _judged(recogniser, Match(node, bindings, seen, set(), tuple(writes)))
    return None


def _in_place(recogniser: Recogniser, node: fx.Node, expr: Expr) -> Match | None:
    """Match `out = x * cos`, then `addcmul_` into both lanes; tables have a dim of size one for the pair."""
    lanes = [user for user in node.users if any(write.target == "addcmul_" for write in user.users)]
    if len(lanes) != 2 or storages(lanes) != storages([node]):
        return None
    for spread, cos in (expr.args, expr.args[::-1]):
        for tail, dim, mode in (((None, 2), -1, INTERLEAVED), ((2, None), -2, HALF)):
            seen: Seen = {node, *lanes}
            pairs = peeled(spread, seen)
            x = split(pairs, *tail)
            if x is None:
                continue
            seen.add(pairs.node)
            whole = Lane(peeled(x, seen), mode, 0)
            found = [_accumulated(recogniser, view, whole, dim, seen) for view in lanes]
            if any(part is None for part in found):
                continue
            (first, write, sin), (second, other, other_sin) = sorted(filter(None, found), key=operator.itemgetter(0))
            if (first, second) == (0, 1) and equal(sin, other_sin) and _floats(whole.x):
                writes = tuple(sorted((write, other), key=lambda one: recogniser.position[one]))
                return _in_place_match(recogniser, node, Rotation(mode, whole.x, cos, sin), dim, writes, seen)
    return None


def _accumulated(
    recogniser: Recogniser, view: fx.Node, whole: Lane, dim: int, seen: Seen
) -> tuple[int, fx.Node, Expr] | None:
    """Return which lane of the result a view is, the write that adds to it, and the sines it adds."""
    chosen = selection(recogniser.canon.of(view), seen)
    write = next(iter(view.users))
    if chosen is None or chosen.size != 1 or chosen.dim - value_of(view).dim() != dim:
        return None
    if len(write.args) != 3 or write.kwargs.get("value", 1) != 1 or write.users:
        return None
    seen.add(write)
    term = product(Expr("mul", tuple(recogniser.canon.of(arg) for arg in write.args[1:])), seen)
    if term is None or term.sign != (-1, 1)[chosen.start]:
        return None
    for factor, sin in (term.factors, term.factors[::-1]):
        trail: Seen = set()
        other = lane(factor, trail)
        if other is not None and other[1:] == (whole.mode, 1 - chosen.start) and equal(other.x, whole.x):
            seen |= trail
            return chosen.start, write, sin
    return None


def _in_place_match(
    recogniser: Recogniser, node: fx.Node, found: Rotation, dim: int, writes: tuple[fx.Node, ...], seen: Seen
) -> Match:
    tables = [_without(table, dim, seen) for table in (found.table, found.sin)]
    bindings = _bindings(found)
    if tables[0] is None or tables[1] is None:
        bindings["reason"] = NO_TABLE
    else:
        bindings |= {"table": tables[0], "sin": tables[1]}
    return _judged(recogniser, _finished(recogniser, Match(node, bindings, seen, set(), writes), found.x))


def _without(table: Any, dim: int, seen: Seen) -> Expr | None:
    """Return a table before a dim of size one was added, or None."""
    inner = peeled(table, seen)
    source = inner.args[0] if isinstance(inner, Expr) and inner.op == "view" else None
    shape, before = shape_of(inner), shape_of(source)
    if source is None or source.node is None or shape is None or before is None or len(shape) < 2:
        return None
    kept = list(shape)
    if kept.pop(dim) != 1 or not same_shape(before, kept):
        return None
    seen.add(inner.node)
    return source if isinstance(source, Expr) else None


def _judged(recogniser: Recogniser, match: Match) -> Match:
    """Add a reason to decline if other nodes read the memory that is written."""
    covered = match.nodes | match.inner | set(match.writes)
    written = storages([match.writes[0].args[0]])  # type: ignore[list-item]
    last = recogniser.position[match.writes[-1]]
    for node in covered:
        if not storages([node]) & written:
            continue
        others = set(node.users) - covered
        if node is match.root:
            others = {user for user in others if recogniser.position[user] < last}
        if others:
            match.bindings["reason"] = ALIASED
    return match


Form = Callable[[Recogniser, fx.Node, Expr], Match | None]

FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("add", "sum", "view_as_real", "stack", "cat"), _value),
    "blank": _strided_writes,
    "mul": _in_place,
}


def decline(match: Match) -> str | None:
    """Decline if memory that is rotated in place is visible elsewhere."""
    reason: str | None = match.bindings.get("reason")
    return reason


def arguments(match: Match) -> Mapping[str, Any]:
    names = ("x", "table", "sin", "mode", "merge_heads")
    return {**{name: match.bindings[name] for name in names}, "out_dtype": match.out.dtype}


FUSION = Fusion(
    name="rope",
    families=("rope",),
    find=find,
    replacement=rope.OP,
    before=("rms_norm", "adalayernorm", "gated_residual", "scaled_add"),
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
