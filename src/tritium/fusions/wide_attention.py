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
from tritium.fusions.match import Recogniser
from tritium.graph import same_shape
from tritium.ops import wide_attention


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match `F.scaled_dot_product_attention` with heads wider than 256; narrower ones have a flash kernel."""
    expr = recogniser.canon.of(node)
    if expr.op != "attention":
        return None
    q, k, v, mask, scale = expr.args
    shapes = [shape_of(side) for side in (q, k, v)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return None
    width = shapes[0][3]  # type: ignore[index]
    if not isinstance(width, int) or width <= wide_attention.WIDEST_FLASH:
        return None
    dropout, causal, grouped = expr.attrs
    bindings = {"q": q, "k": k, "v": v, "scale": width**-0.5 if scale is None else scale}
    asked = {"mask": mask, "dropout": dropout, "causal": causal, "grouped": grouped}
    return Match(node, {**bindings, **asked}, {node})


def decline(match: Match) -> str | None:
    """Decline every variant but plain attention."""
    bound = match.bindings
    if bound["mask"] is not None:
        return "the attention has a mask"
    if isinstance(bound["dropout"], Expr | fx.Node) or bound["dropout"] != 0:
        return "the attention drops weights at random"
    if bound["causal"] is not False:
        return "the attention is causal"
    if bound["grouped"] is not False:
        return "groups of heads share keys"
    q, k, v = (shape_of(bound[name]) for name in "qkv")
    assert q is not None
    assert k is not None
    assert v is not None
    if not same_shape(q[:2], k[:2]) or not same_shape(k[:3], v[:3]):
        return "the shapes of query, key and value are broadcast"
    if len({dtype_of(bound[name]) for name in "qkv"}) > 1:
        return "query, key and value have different dtypes"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    return {name: match.bindings[name] for name in ("q", "k", "v", "scale")}


FUSION = Fusion(
    name="wide_attention",
    families=("wide_attention",),
    find=find,
    replacement=wide_attention.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
