"""Compute attention by the provider that was measured fastest, if that is another one than PyTorch's own choice.

Before:  scaled_dot_product_attention(q, k, v, mask, is_causal=..., scale=...), heads up to 256 wide
After:   tritium::attention(q, k, v, mask, scale, causal)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tritium.fusions.expression import Expr
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.wide_attention import ATTENTION, decline_dropout
from tritium.graph import same_shape
from tritium.ops import attention


def accept(match: Match) -> bool:
    """Accept batches of heads; wider heads belong to `wide_attention`, which matches earlier."""
    shapes = map(match.shape, "qkv")
    return all(shape is not None and len(shape) == 4 for shape in shapes)


def decline(match: Match) -> str | None:
    """Decline what the op does not express."""
    bound = match.bindings
    if reason := decline_dropout(match):
        return reason
    if not isinstance(bound["causal"], bool) or not isinstance(bound["grouped"], bool):
        return "the graph computes whether the attention is causal, or whether heads share keys"
    if isinstance(bound["scale"], Expr):
        return "the graph computes the scale"
    if bound["scale"] is None and not isinstance(bound["q"].value.shape[3], int):
        return "the width of the heads is symbolic"
    q, k, v = (match.shape(name) or torch.Size() for name in "qkv")
    if not same_shape(q[:1], k[:1]) or not same_shape(k[:2], v[:2]):
        return "the shapes of query, key and value are broadcast"
    if not same_shape(q[1:2], k[1:2]):
        if not bound["grouped"]:
            return "the shapes of query, key and value are broadcast"
        if not isinstance(q[1], int) or not isinstance(k[1], int) or q[1] % k[1]:
            return "the heads of queries are no fixed multiple of those of keys"
    if len({*map(match.dtype, "qkv")}) > 1:
        return "query, key and value have different dtypes"
    if bound["mask"] is not None and len(match.shape("mask") or ()) != 4:
        return "the mask has not the four dims of the scores"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    scale = match.bindings["scale"]
    return {**match.bindings, "scale": match.bindings["q"].value.shape[3] ** -0.5 if scale is None else float(scale)}


FUSION = Fusion(
    name="attention",
    families=("attention",),
    spellings=(ATTENTION,),
    rounds=False,
    replacement=attention.OP,
    accept=accept,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
