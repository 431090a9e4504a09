"""The root-mean-square norm as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tritium.errors import ArgumentError
from tritium.layers import checks
from tritium.layers.compute import Layer, compute
from tritium.ops import rms_norm

RANKS = range(2, 9)


class RMSNorm(nn.Module):
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dim in float32, rounded to x's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        checks.size("hidden_size", hidden_size)
        checks.number("eps", eps)
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor, if_fused: bool = True) -> torch.Tensor:
        return compute(_LAYER, if_fused, x, self.weight, self.eps)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _check(if_fused: bool, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    checks.tensor("x", x)
    checks.boolean("if_fused", if_fused)
    checks.rank("x", x, *RANKS)
    checks.tensor("weight", weight)
    checks.rank("weight", weight, 1)
    checks.numbers_of(x=x, weight=weight)
    checks.number("eps", eps)
    if x.shape[-1] != weight.shape[0]:
        raise ArgumentError(f"x must have rows of {weight.shape[0]} numbers, got {x.shape[-1]}")
    checks.together(x=x, weight=weight)


def _arguments(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[Any, ...]:
    return x, weight, float(eps), None


_LAYER = Layer(rms_norm.OP, _check, _arguments)
