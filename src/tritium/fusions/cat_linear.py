"""Fuse a concatenation along the last dim into the linear that reads it, as in FLUX's single blocks.

Before:  cat([a, b], -1) -> linear
After:   tritium::cat_linear([a, b], weight, bias)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tritium.fusions.expression import Expr, shape_of, strip_same
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import cat_linear


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a linear whose input is concatenated along the last dim; other dims are not supported."""
    expr = recogniser.canon.of(node)
    if expr.op != "linear":
        return None
    joined = strip_same(expr.args[0])
    if not isinstance(joined, Expr) or joined.op != "cat" or joined.node is None:
        return None
    rank = len(shape_of(joined) or ())
    if joined.attrs != (rank - 1,) or not all(isinstance(part, Expr) for part in joined.args):
        return None
    bindings = {"parts": joined.args, "weight": expr.args[1], "bias": expr.args[2]}
    return Match(node, bindings, {node}, {joined.node})


def decline(match: Match) -> str | None:
    """Decline parts of different dtypes: the concatenation promotes them."""
    dtypes = {part.value.dtype for part in match.bindings["parts"]}
    return None if len(dtypes) == 1 else "the parts have different dtypes"


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    return {
        "parts": list(bound["parts"]),
        "weight": bound["weight"],
        "bias": bound["bias"],
        "out_dtype": match.out.dtype,
    }


FUSION = Fusion(
    name="cat_linear",
    families=("cat_linear",),
    find=find,
    region=True,
    replacement=cat_linear.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
