"""Fuse a GELU into the linear in front of it: the activation can be the GEMM's epilogue.

Before:  linear(x) -> gelu
After:   tritium::linear_gelu(x, weight, bias, approximate)

A GELU of a half or a slice of the linear's result is a gate, and no site.
"""

from __future__ import annotations

from tritium.fusions.fusion import Fusion
from tritium.fusions.patterns import form, value
from tritium.ops import linear_gelu

LINEAR = form("linear", value("x"), value("weight"), value("bias"), casts=False)

FUSION = Fusion(
    name="linear_gelu",
    families=("linear_gelu",),
    spellings=(form("gelu", LINEAR, attrs=(value("approximate"),)),),
    region=True,
    rounds=False,
    replacement=linear_gelu.OP,
    used_elsewhere="the linear's result is used elsewhere too",
    doc=__doc__,
)
