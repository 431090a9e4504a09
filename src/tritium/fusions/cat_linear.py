"""Fuse a concatenation along the last dim into the linear that reads it, as in FLUX's single blocks.

Before:  cat([a, b], -1) -> linear
After:   tritium::cat_linear([a, b], weight, bias)
"""

from __future__ import annotations

from tritium.fusions.expression import dtype_of, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, given, rest, shared, value
from tritium.ops import cat_linear

JOINED = form("cat", rest("parts"), attrs=(value("dim"),), casts=False)
LINEAR = form("linear", shared(JOINED), value("weight"), value("bias"))
QUANTIZED = form("quantize_rows", shared(JOINED), value("scale"), value("step"))


def accept(match: Match) -> bool:
    """Accept a concatenation along the last dim; other dims are not supported."""
    ranks = [len(shape_of(part) or ()) for part in match.bindings["parts"]]
    return bool(match.bindings["dim"] == ranks[0] - 1)


def decline(match: Match) -> str | None:
    """Decline parts of different dtypes, which the concatenation promotes, and a linear that reads it in 8 bits."""
    if match.bindings["is_quantized"]:
        return "the linear is quantized, and its rows have one scale for all parts"
    dtypes = {dtype_of(part) for part in match.bindings["parts"]}
    return None if len(dtypes) == 1 else "the parts have different dtypes"


FUSION = Fusion(
    name="cat_linear",
    families=("cat_linear",),
    spellings=(given(LINEAR, is_quantized=False), given(QUANTIZED, is_quantized=True)),
    before=("linear_gelu",),
    region=True,
    rounds=False,
    replacement=cat_linear.OP,
    accept=accept,
    decline=decline,
    doc=__doc__,
)
