"""Fuse `x * s + y` with any number s into `tritium::scaled_add`.

Before:  mul(x, s) -> add(., y)
After:   tritium::scaled_add(x, s, y)
"""

from __future__ import annotations

import torch

from tritium.fusions.fusion import Fusion, Match
from tritium.graph import same_shape
from tritium.ops import scaled_add


def scaled(x: torch.Tensor, scale: float, y: torch.Tensor) -> torch.Tensor:
    return x * scale + y


def accept(match: Match) -> bool:
    """Accept floating-point tensors of the result's shape; arithmetic on indices is excluded."""
    if not isinstance(match.out, torch.Tensor) or not match.out.dtype.is_floating_point:
        return False
    return all(same_shape(match.shape(name), match.out.shape) for name in ("x", "y"))


FUSION = Fusion(
    name="scaled_add",
    families=("mul_add",),
    spellings=(scaled,),
    replacement=scaled_add.OP,
    accept=accept,
    doc=__doc__,
)
