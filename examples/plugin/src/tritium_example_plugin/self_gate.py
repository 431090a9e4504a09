"""Fuse `x + gate * x`, a residual that gates itself, into the op `gated_residual`.

Before:  mul(gate, x) -> add(x, .)
After:   tritium::gated_residual(x, gate, x), counted in a separate family, `self_gate`
"""

from __future__ import annotations

import torch

from tritium.ops import gated_residual
from tritium.plugins import Fusion, Match


def gate_by_itself(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x + gate * x


def accept(match: Match) -> bool:
    return match.shape("x") == match.out.shape


FUSION = Fusion(
    name="self_gate",
    families=("self_gate",),
    spellings=(gate_by_itself,),
    before=("gated_residual",),
    replacement=gated_residual.OP,
    accept=accept,
    arguments=lambda match: {
        "x": match.bindings["x"],
        "gate": match.bindings["gate"],
        "y": match.bindings["x"],
        "out_dtype": match.out.dtype,
    },
    doc=__doc__,
)
