"""Fuse the gating of GEGLU and SwiGLU, `activation(gate) * value`, into `tritium::gated_activation`.

Before:  silu(a) -> mul b        gelu(a) -> mul b
After:   tritium::gated_activation(a, b, activation), with the same formula: no approximation

Forms, in either operand order, with a and b of one shape: halves of one projection, two projections, slices.
"""

from __future__ import annotations

from tritium.fusions.expression import shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, given, one_of, value
from tritium.graph import same_shape
from tritium.ops import gated_activation

GATE = value("gate")
ACTIVATED = one_of(
    given(form("silu", GATE), activation="silu"),
    given(form("gelu", GATE, attrs=("tanh",)), activation="gelu_tanh"),
    given(form("gelu", GATE, attrs=("none",)), activation="gelu"),
)


def accept(match: Match) -> bool:
    """Accept values of one shape: `x * silu(scale)` with a broadcast scale is a modulation, not a gate."""
    return all(same_shape(shape_of(match.bindings[name]), match.out.shape) for name in ("gate", "value"))


def decline(match: Match) -> str | None:
    """Decline an activation in another dtype than its input, such as FP32SiLU: the op has one dtype."""
    gate, value, out = match.dtype("gate"), match.dtype("value"), match.out.dtype
    return None if gate == value == out else f"the gate is {gate}, the value {value}, the result {out}"


FUSION = Fusion(
    name="gated_activation",
    families=("gelu",),
    spellings=(form("mul", ACTIVATED, value("value")),),
    before=("gelu", "gated_residual", "adalayernorm"),
    rounds=False,
    replacement=gated_activation.OP,
    accept=accept,
    decline=decline,
    doc=__doc__,
)
