"""Recognise the norm of a query or key and the RoPE after it, with what moves elements between them, as one region.

Before:  norm(q) -> (reshape, transpose, cat with the text's) -> rope -> (transpose)
After:   one region; its parts are counted and computed in their own families, no single op takes it over yet
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tritium.fusions.expression import Expr
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser

# Operations that only move elements: a norm and a RoPE on both sides of them belong together.
MOVES = frozenset({"same", "cast", "view", "reshape", "permute", "index", "piece", "pieces", "cat"})


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """A RoPE whose input is a norm, reached through moves alone; in a concatenation, any part may be normed."""
    site = recogniser.sites.get(node)
    if site is None or site[0].name != "rope":
        return None
    rotated = site[1]
    norm = next((found for part in rotated.bindings.values() if (found := _norm(recogniser, part)) is not None), None)
    if norm is None:
        return None
    nodes, families = norm
    return Match(node, {}, {node}, (nodes | rotated.nodes) - {node}, covers=("rope", *families))


def _norm(recogniser: Recogniser, expr: Any) -> tuple[set[fx.Node], tuple[str, ...]] | None:
    stack = [expr]
    while stack:
        current = stack.pop()
        if not isinstance(current, Expr):
            continue
        site = recogniser.site_at(current, "rms_norm")
        if site is not None:
            return site.nodes, ("rms_norm",)
        if current.op == "layer_norm" and current.node is not None:
            return {current.node}, ()
        if current.op in MOVES:
            stack.extend(current.args)
    return None


FUSION = Fusion(name="qk_norm_rope", families=("qk_norm_rope",), find=find, region=True, doc=__doc__)
