"""Compute attention with matrix products if heads are too wide for flash kernels, as in an image VAE.

Before:  scaled_dot_product_attention(q, k, v), one head of 512
After:   tritium::wide_attention(q, k, v, scale)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, value
from tritium.graph import same_shape
from tritium.ops import wide_attention

ATTENTION = form(
    "attention",
    *map(value, ("q", "k", "v", "mask", "scale")),
    attrs=tuple(map(value, ("dropout", "causal", "grouped"))),
)


def accept(match: Match) -> bool:
    """Accept heads wider than 256; narrower ones have a flash kernel."""
    shapes = [shape_of(match.bindings[name]) for name in "qkv"]
    width = shapes[0][3] if all(shape is not None and len(shape) == 4 for shape in shapes) else None  # type: ignore[index]
    return isinstance(width, int) and width > wide_attention.WIDEST_FLASH


def decline_dropout(match: Match) -> str | None:
    dropout = match.bindings["dropout"]
    is_off = not isinstance(dropout, Expr | fx.Node) and dropout == 0
    return None if is_off else "the attention drops weights at random"


def decline(match: Match) -> str | None:
    """Decline every variant but plain attention."""
    bound = match.bindings
    if bound["mask"] is not None:
        return "the attention has a mask"
    if reason := decline_dropout(match):
        return reason
    if bound["causal"] is not False:
        return "the attention is causal"
    if bound["grouped"] is not False:
        return "groups of heads share keys"
    q, k, v = (shape_of(bound[name]) or () for name in "qkv")
    if not same_shape(q[:2], k[:2]) or not same_shape(k[:3], v[:3]):
        return "the shapes of query, key and value are broadcast"
    if len({dtype_of(bound[name]) for name in "qkv"}) > 1:
        return "query, key and value have different dtypes"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    scale, width = match.bindings["scale"], match.bindings["q"].value.shape[3]
    return {**match.bindings, "scale": width**-0.5 if scale is None else scale}


FUSION = Fusion(
    name="wide_attention",
    families=("wide_attention",),
    spellings=(ATTENTION,),
    before=("attention",),
    rounds=False,
    replacement=wide_attention.OP,
    accept=accept,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
