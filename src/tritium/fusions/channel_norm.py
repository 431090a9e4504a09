"""Fuse the RMSNorm over channels of Wan's VAE, and a SiLU after it, into one op.

The norm is written as `F.normalize(x, dim) * sqrt(d) * weight + 0.0`.

Before:  normalize(x, dim=1) -> mul sqrt(d) -> mul weight -> add 0.0 -> silu
After:   tritium::channel_norm(x, weight, scale, shift, dim, eps, silu)

The added number and the SiLU are part of a site if no other node reads the values between.
"""

from __future__ import annotations

from tritium.fusions.expression import shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import form, given, number, one_of, only_reader, optional, tensor, value
from tritium.graph import same_size
from tritium.ops import channel_norm

NORMALIZED = form("normalize", tensor("x"), attrs=(value("dim"), value("eps")))
# `dynamic=True` turns a float of the module into an input.
SCALED = form("mul", form("mul", NORMALIZED, number("scale")), value("weight"))
SHIFTED = optional(form("add", only_reader(SCALED), number("shift")), SCALED, shift=0.0)


def accept(match: Match) -> bool:
    """Accept one weight per channel: size one in every other dim."""
    of_weight, of_x, dim = shape_of(match.bindings["weight"]), match.shape("x"), match.bindings["dim"]
    if of_weight is None or of_x is None or len(of_weight) > len(of_x):
        return False
    aligned = [1] * (len(of_x) - len(of_weight)) + list(of_weight)
    return all(same_size(size, of_x[index] if index == dim else 1) for index, size in enumerate(aligned))


FUSION = Fusion(
    name="channel_norm",
    families=("rms_norm",),
    spellings=(one_of(given(form("silu", only_reader(SHIFTED)), silu=True), given(SHIFTED, silu=False)),),
    before=("adalayernorm",),
    replacement=channel_norm.OP,
    accept=accept,
    doc=__doc__,
)
