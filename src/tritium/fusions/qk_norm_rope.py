"""Fuse the operations on an attention's query and key between the projections and the attention.

Before:  norm(q) -> heads -> (cat with the text's) -> rope -> transpose, and the same for k, in any of these orders:
         norm, cat, rope (FLUX); norm, rope, cat (Qwen-Image); norm over all heads, rope (Wan); norm, cat (SD3)
After:   tritium::qk_norm_rope([text q, image q], [text k, image k], ...) -> q, k
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Call, Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.fusions.patterns import same_value
from tritium.graph import argument, same_shape, same_size, value_of
from tritium.ops import qk_norm_rope
from tritium.ops.rope import COMPLEX, MATRIX

SWAP = (0, 2, 1, 3)


@dataclass
class Side:
    """How a query or key is computed: its parts in order, and the nodes on the way."""

    parts: list[Part] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class Part:
    """One stream of tokens. `source` is [B, S, H, D], before its norm."""

    source: Any = None
    norm: str = "none"
    weight: Any = None
    eps: Any = 0.0
    # The match of the RoPE, and whether its operand is [B, H, S, D].
    rope: Match | None = None
    rope_heads_first: bool = False
    # True after a concatenation: a rotation before it in the walk covers all parts.
    joined: bool = False


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match an attention whose query and key are both normed, and rotated or joined."""
    if node.target is not F.scaled_dot_product_attention:
        return None
    given = [argument(node, place, name) for place, name in ((0, "query"), (1, "key"))]
    if not all(isinstance(arg, fx.Node) and _is_heads(arg) for arg in given) or given[0] is given[1]:
        return None
    sides = [Side() for _ in given]
    for arg, side in zip(given, sides, strict=True):
        _walk(recogniser, recogniser.canon.of(arg), Part(), True, side)
    query, key = sides
    if not all(part.norm != "none" for side in sides for part in side.parts):
        return None
    if not any(part.rope is not None for part in query.parts) and len(query.parts) < 2:
        return None
    parts = [*query.parts, *key.parts]
    ropes = [part.rope for part in parts if part.rope is not None]
    bindings = {
        "query": query.parts,
        "key": key.parts,
        # All values that are read, so that writes to them are detected.
        "read": [thing for part in parts for thing in (part.source, part.weight)]
        + [rope.bindings[name] for rope in ropes for name in ("table", "sin")],
    }
    return Match(
        max(given),
        bindings,
        set(given),
        (query.nodes | key.nodes).difference(given),
        tuple(sorted({write for rope in ropes for write in rope.writes}, key=recogniser.position.__getitem__)),
        outputs=tuple(given),
        shown=() if value_of(given[0]).is_contiguous() else ("transpose", 1, 2),
    )


def _is_heads(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _walk(recogniser: Recogniser, expr: Any, part: Part, heads_first: bool, side: Side) -> None:
    """Walk from the attention back to the projections, collecting the operations in `part` and `side`."""
    while isinstance(expr, Expr) and expr.node is not None:
        fusion, match = recogniser.sites.get(expr.node, (None, None))
        passed, inner = {expr.node}, expr.args[0] if expr.args else None
        if fusion is not None and match is not None:
            taken = _through_site(fusion.name, match, part, heads_first)
            if taken is None:
                break
            part, inner, passed = taken, match.bindings["x"], match.nodes | match.inner | passed
        elif expr.op == "permute" and expr.attrs == SWAP:
            heads_first = not heads_first
        elif expr.op == "cat" and expr.attrs == (2 if heads_first else 1,) and not part.joined and part.norm == "none":
            side.nodes |= passed
            for arg in expr.args:
                _walk(recogniser, arg, replace(part, joined=True), heads_first, side)
            return
        elif not heads_first and part.norm == "none" and _row_normed(recogniser, expr, part, side):
            side.nodes |= passed
            return
        elif expr.op not in ("same", "cast"):
            break
        side.nodes |= passed
        expr = inner
    source = Call("transpose", (expr, 1, 2)) if heads_first else expr
    side.parts.append(replace(part, source=source))


def _row_normed(recogniser: Recogniser, expr: Expr, part: Part, side: Side) -> bool:
    """Complete the part and return True if an expression splits a norm over all heads into heads."""
    found = recogniser.site_at(expr.args[0], "rms_norm") if expr.op == "reshape" and _splits_heads(expr) else None
    if found is None:
        return False
    bound, heads = found.bindings, list(shape_of(expr) or ())[2:]
    side.nodes |= found.nodes | found.shared
    source = Call("unflatten", (bound["x"], -1, heads))
    side.parts.append(replace(part, source=source, norm="row", weight=bound["weight"], eps=bound["eps"]))
    return True


def _through_site(name: str, match: Match, part: Part, heads_first: bool) -> Part | None:
    bound = match.bindings
    if name == "rope" and part.rope is None and part.norm == "none" and not bound.get("merge_heads"):
        return replace(part, rope=match, rope_heads_first=heads_first)
    if name == "rms_norm" and part.norm == "none":
        return replace(part, norm="head", weight=bound["weight"], eps=bound["eps"])
    return None


def _splits_heads(expr: Expr) -> bool:
    """Return True for [B, S, H * D] -> [B, S, H, D] with known H and D."""
    before, after = shape_of(expr.args[0]), shape_of(expr)
    if before is None or after is None or (len(before), len(after)) != (3, 4):
        return False
    return same_shape(before[:2], after[:2]) and all(isinstance(size, int) for size in after[2:])


def decline(match: Match) -> str | None:
    """Decline a query and key that differ in more than their values."""
    query, key = match.bindings["query"], match.bindings["key"]
    parts = [*query, *key]
    if len(query) != len(key):
        return f"the query has {len(query)} parts and the key {len(key)}"
    for part in parts:
        if part.norm != parts[0].norm or not same_value(part.eps, parts[0].eps):
            return "the norms of query and key differ"
    for mine, other in zip(query, key, strict=True):
        if not same_size(_tokens(mine.source), _tokens(other.source)):
            return "query and key have different numbers of tokens"
        if (mine.rope is None) != (other.rope is None):
            return "only one of query and key is rotated"
        if mine.rope is not None and not _same_rope(mine, other):
            return "query and key are rotated by different tables"
    modes = {part.rope.bindings["mode"] for part in parts if part.rope is not None}
    if len(modes) > 1 or MATRIX in modes:
        return f"rotations of mode {', '.join(sorted(modes))}"
    if any(_table(part, name) is None for part in query for name in ("table", "sin") if part.rope is not None):
        return "the tables are not one row a token, for all heads"
    outs = [value_of(node) for node in match.values]
    if {dtype_of(_inner(part.source)) for part in parts} != {out.dtype for out in outs}:
        return "the values are rounded to another dtype on the way"
    reasons = [part.rope.bindings["reason"] for part in parts if part.rope and part.rope.bindings.get("reason")]
    return reasons[0] if reasons else None


def _inner(source: Any) -> Any:
    return source.args[0] if isinstance(source, Call) else source


def _tokens(source: Any) -> Any:
    shape = list(shape_of(_inner(source)) or ())
    return shape[2] if isinstance(source, Call) and source.method == "transpose" else shape[1]


def _same_rope(one: Part, other: Part) -> bool:
    assert one.rope is not None
    assert other.rope is not None
    mine, its = one.rope.bindings, other.rope.bindings
    same = mine["mode"] == its["mode"] and all(same_value(mine[name], its[name]) for name in ("table", "sin"))
    return same and one.rope_heads_first == other.rope_heads_first


def _table(part: Part, name: str) -> Any:
    """Return the table as [B or 1, S, W], or None if it differs by head; () if there is none."""
    assert part.rope is not None
    table, mode = part.rope.bindings[name], part.rope.bindings["mode"]
    if table is None:
        return ()
    value = table.value
    # Complex numbers as real pairs have an extra dim.
    extra = 1 if mode == COMPLEX and not value.is_complex() else 0
    rank, heads = value.dim() - extra, 1 if part.rope_heads_first else 2
    missing = 4 - rank
    if missing < 0 or not isinstance(value, torch.Tensor):
        return None
    if heads < missing:
        # No dim for heads: the table is [S, W] in front of them.
        return Call("unsqueeze", (table, 0)) if heads == 1 and rank == 2 else None
    if not same_size(value.shape[heads - missing], 1):
        return None
    without = Call("squeeze", (table, heads - missing))
    return without if missing == 0 else Call("unsqueeze", (without, 0)) if missing == 1 else None


def arguments(match: Match) -> Mapping[str, Any]:
    query, key = match.bindings["query"], match.bindings["key"]
    rotated = [part for part in query if part.rope is not None]
    # A rotation after the parts were joined has one table for all tokens.
    together = len(query) > 1 and all(part.rope is query[0].rope for part in query)
    turned = query[:1] if together and rotated else query
    return {
        "q": [part.source for part in query],
        "k": [part.source for part in key],
        "q_weights": [part.weight for part in query],
        "k_weights": [part.weight for part in key],
        "tables": [_table(part, "table") if part.rope is not None else None for part in turned],
        "sines": [_table(part, "sin") or None if part.rope is not None else None for part in turned],
        "eps": query[0].eps,
        "norm": query[0].norm,
        "rope": rotated[0].rope.bindings["mode"] if rotated else "none",
        "heads_first": not match.shown,
    }


FUSION = Fusion(
    name="qk_norm_rope",
    families=("qk_norm_rope",),
    find=find,
    region=True,
    replacement=qk_norm_rope.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
