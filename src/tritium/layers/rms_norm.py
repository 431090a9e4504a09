"""The root-mean-square norm as a module."""

from __future__ import annotations

import torch
from torch import nn

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_rank, checked
from tritium.layers.eager import compute
from tritium.ops import rms_norm


class RMSNorm(nn.Module):
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dim in float32, rounded to x's dtype."""

    @checked
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor, if_fused: bool = True) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, if_fused)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@checked
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, if_fused: bool) -> torch.Tensor:
    check_rank("weight", weight, 1)
    if x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ArgumentError(f"x must have rows of {weight.shape[0]} numbers, got shape {tuple(x.shape)}")
    return compute(rms_norm.OP, if_fused, x, weight, float(eps), None)  # type: ignore[no-any-return]
