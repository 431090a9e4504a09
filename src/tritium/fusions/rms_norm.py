"""Fuse a hand-written or whole RMSNorm over the last dim into `tritium::rms_norm`.

Before:  pow(x, 2) -> mean -> add eps -> rsqrt -> mul x -> mul weight
After:   tritium::rms_norm(x, weight, eps)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tritium.fusions.fusion import Fusion, Match
from tritium.graph import same_size
from tritium.ops import rms_norm


def weighted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def accept(match: Match) -> bool:
    """Accept a factor with one element per column; other shapes are modulations or gates, not weights."""
    if "weight" not in match.bindings:
        return True
    x, weight = match.shape("x"), match.shape("weight")
    return x is not None and weight is not None and len(weight) == 1 and same_size(weight[0], x[-1])


def decline(match: Match) -> str | None:
    dtype = match.dtype("x")
    if dtype is None or not dtype.is_floating_point:
        return f"RMSNorm of {dtype}"
    return None


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    return {"x": bound["x"], "weight": bound.get("weight"), "eps": bound["eps"], "out_dtype": match.out.dtype}


FUSION = Fusion(
    name="rms_norm",
    families=("rms_norm",),
    spellings=(weighted, plain),
    priority=10,
    replacement=rms_norm.OP,
    accept=accept,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
