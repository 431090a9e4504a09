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
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.fusions.patterns import Found, Pattern, all_match, captured, form, given, one_of, tensor, value
from tritium.fusions.rope_elements import (
    Seen,
    column,
    lane,
    pairs,
    peeled,
    product,
    restriction,
    selection,
    signed,
)
from tritium.graph import same_shape, storages, value_of
from tritium.ops import rope
from tritium.ops.rope import COMPLEX, HALF, INTERLEAVED, MATRIX

ALIASED = "memory that is rotated in place is read or written elsewhere too"
NO_TABLE = "the tables have a dim for the pair, and no value of the graph is without it"

X, TABLE, SIN = map(tensor, ("x", "table", "sin"))


def _lanes(mode: str) -> tuple[Pattern, Pattern]:
    """Return the lanes of the result: `a * cos - b * sin` and `b * cos + a * sin` of the lanes a and b of x."""
    a, b = (lane(mode, place, X) for place in (0, 1))
    first = form("add", product(1, captured("own", a), TABLE), product(-1, b, SIN))
    return captured("result", first), form("add", product(1, b, TABLE), product(1, a, SIN))


def _turned(mode: str, sign: int) -> Pattern:
    """Return `stack(-b, a)` flattened or `cat(-b, a)` of the lanes a and b of x; both signs may be the opposite."""
    lanes = signed(-sign, lane(mode, 1, X)), signed(sign, lane(mode, 0, X))
    joined = form(JOINS[mode], *lanes, attrs=(value("dim"),))
    return joined if mode == HALF else one_of(form("reshape", joined), form("view", joined))


def _of_mode(mode: str) -> Pattern:
    whole = [
        form("add", product(1, X, TABLE), product(sign, captured("own", _turned(mode, sign)), SIN)) for sign in (1, -1)
    ]
    return given(one_of(*whole, form(JOINS[mode], *LANES[mode], attrs=(value("dim"),))), mode=mode)


JOINS = {INTERLEAVED: "stack", HALF: "cat"}
LANES = {mode: _lanes(mode) for mode in JOINS}
NUMBERS = captured("own", form("view_as_complex", pairs(X, None, 2)))
COLUMN = pairs(X, None, 1, 2)
BY_COLUMNS = form("add", *(product(1, column(place, TABLE), column(place, COLUMN)) for place in (0, 1)))
BY_SUM = form("sum", product(1, TABLE, COLUMN), attrs=(value("dim"),))
ROTATION = one_of(
    *map(_of_mode, JOINS),
    given(form("view_as_real", captured("result", form("mul", NUMBERS, TABLE))), sin=None, mode=COMPLEX),
    given(one_of(BY_COLUMNS, BY_SUM), sin=None, mode=MATRIX),
)


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a rotation in which x, tables, halves and signs agree in all four products."""
    expr = recogniser.canon.of(node)
    if expr.op == "blank":
        return _strided_writes(recogniser, node)
    if expr.op == "mul":
        return _in_place(recogniser, node)
    for found in recogniser.matches(ROTATION, node):
        if _is_rotation(found, expr):
            return _finished(recogniser, Match(node, _bindings(found), {node, *found.nodes}))
    return None


def _is_rotation(found: Found, expr: Expr) -> bool:
    """Return True if the shapes and dtypes are those of a rotation."""
    bound = found.bindings
    x, table, mode = shape_of(bound["x"]) or (), shape_of(bound["table"]) or (), bound["mode"]
    dtypes = [dtype_of(bound[name]) for name in ("x", "table", "sin") if bound[name] is not None]
    if bound["x"].node is None or not all(_is_float(dtype) for dtype in dtypes[: 1 if mode == COMPLEX else None]):
        return False
    if mode == MATRIX:
        summed = bound.get("dim", len(shape_of(expr) or ()))
        return len(table) >= 3 and tuple(table[-2:]) == (2, 2) and summed == len(shape_of(expr) or ())
    if mode == COMPLEX and (dtypes[1] is None or not dtypes[1].is_complex):
        return False
    if "dim" in bound and bound["dim"] != len(x) - (mode == HALF):
        return False
    # Lanes have a value for each pair, and the rank of x.
    result = shape_of(bound["result"]) if "result" in bound else x
    return len(result or ()) == len(x) and same_shape(shape_of(bound["own"]), result)


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _bindings(found: Found) -> dict[str, Any]:
    return {name: found.bindings[name] for name in ("x", "table", "sin", "mode")}


def _finished(recogniser: Recogniser, match: Match) -> Match:
    """Extend a match over merged lanes, merged heads and rounding; separate unshared from shared nodes."""
    root, seen, shape = match.root, set(match.nodes), match.shape("x") or ()
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


def _strided_writes(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match an empty tensor that is filled by two writes, one per lane."""
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
    for mode, lanes in LANES.items():
        if {(mode, 0), (mode, 1)} != set(values):
            continue
        targets = [recogniser.canon.of(values[mode, place]) for place in (0, 1)]
        for found in all_match(lanes, targets, Found(recogniser, {"mode": mode})):
            if _is_rotation(found, targets[0]):
                bindings = {**_bindings(found), "merge_heads": False}
                match = Match(node, bindings, {node, *writes, *found.nodes}, set(), tuple(writes))
                return _judged(recogniser, match)
    return None


def _in_place(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match `out = x * cos`, then `addcmul_` into both lanes; tables have a dim of size one for the pair."""
    views = [user for user in node.users if any(write.target == "addcmul_" for write in user.users)]
    if len(views) != 2 or storages(views) != storages([node]):
        return None
    for mode, tail, dim in ((INTERLEAVED, (None, 2), -1), (HALF, (2, None), -2)):
        seen = {node, *views}
        chosen = [(selection(recogniser.canon.of(view), seen), view) for view in views]
        lanes = {
            part.start: next(iter(view.users))
            for part, view in chosen
            if part is not None and part.size == 1 and part.dim - value_of(view).dim() == dim
        }
        for spread in recogniser.matches(form("mul", pairs(X, *tail), TABLE), node):
            found = _accumulated(recogniser, lanes, mode, spread) if lanes.keys() == {0, 1} else None
            if found is None or not _is_float(dtype_of(found.bindings["x"])):
                continue
            writes = tuple(sorted(lanes.values(), key=recogniser.position.__getitem__))
            seen |= {*writes, *found.nodes}
            bindings = dict(found.bindings) | {"mode": mode}
            tables = {name: _without(bindings[name], dim, seen) for name in ("table", "sin")}
            bindings |= tables if None not in tables.values() else {"reason": NO_TABLE}
            return _judged(recogniser, _finished(recogniser, Match(node, bindings, seen, set(), writes)))
    return None


def _accumulated(recogniser: Recogniser, lanes: dict[int, fx.Node], mode: str, found: Found) -> Found | None:
    """Match the writes that add `-b * sin` to lane 0 and `a * sin` to lane 1."""
    for place, write in sorted(lanes.items()):
        if len(write.args) != 3 or write.kwargs.get("value", 1) != 1 or write.users:
            return None
        added = Expr("mul", tuple(map(recogniser.canon.of, write.args[1:])))
        matches = product((-1, 1)[place], lane(mode, 1 - place, X), SIN).match(added, found)
        following = next(matches, None)
        if following is None:
            return None
        found = following
    return found


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
