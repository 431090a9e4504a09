"""Fuse `x + gate * x`, a residual that gates itself, into the op `gated_residual`.

Before:  mul(gate, x) -> add(x, .)
After:   tritium::gated_residual(x, gate, x), in a separate family, `self_gate`, with the switch `enable_self_gate`
"""

from __future__ import annotations

from tritium.ops import gated_residual
from tritium.plugins import Fusion, Match, patterns

X = patterns.tensor("x")
# The names are parameters of the op: x is captured a second time as y.
GATED = patterns.form("mul", patterns.tensor("gate"), patterns.captured("y", X))


def accept(match: Match) -> bool:
    return match.shape("x") == match.out.shape


def decline(match: Match) -> str | None:
    return "the gate is as large as what it gates" if match.shape("gate") == match.shape("x") else None


FUSION = Fusion(
    name="self_gate",
    families=("self_gate",),
    spellings=(patterns.form("add", X, GATED),),
    before=("gated_residual",),
    replacement=gated_residual.OP,
    accept=accept,
    decline=decline,
    doc=__doc__,
)
