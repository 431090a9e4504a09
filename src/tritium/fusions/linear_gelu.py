"""Fuse a GELU into the linear in front of it: the activation can be the GEMM's epilogue.

Before:  linear(x) -> gelu
After:   tritium::linear_gelu(x, weight, bias, approximate)

A GELU of a half or a slice of the linear's result is a gate, and no site.
"""

from __future__ import annotations

from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, given, one_of, value
from tritium.ops import linear_gelu

LINEAR = form("linear", value("x"), value("weight"), value("bias"), casts=False)
QUANTIZED = form(
    "scaled_linear",
    *(value(name) for name in ("x", "scale", "weight", "weight_scale", "bias")),
    casts=False,
)
PRODUCT = one_of(given(LINEAR, is_quantized=False), given(QUANTIZED, is_quantized=True))


def decline(match: Match) -> str | None:
    """Decline a quantized linear: cuBLAS has no such epilogue for 8 bits."""
    return "the linear is quantized, and its product has another epilogue" if match.bindings["is_quantized"] else None


FUSION = Fusion(
    name="linear_gelu",
    families=("linear_gelu",),
    spellings=(form("gelu", PRODUCT, attrs=(value("approximate"),)),),
    region=True,
    rounds=False,
    replacement=linear_gelu.OP,
    decline=decline,
    used_elsewhere="the linear's result is used elsewhere too",
    doc=__doc__,
)
