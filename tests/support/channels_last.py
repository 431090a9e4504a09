"""Small models of convolutions, compiled with channels-last also on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium

ON = tritium.CompilationConfig()


EAGER = ON.with_(engine="eager")


STATIC_IF_THOROUGH = [
    pytest.param(False, marks=pytest.mark.thorough, id="static"),
    pytest.param(True, id="dynamic"),
]


def compile_eagerly(model, **kwargs):
    return torch.compile(model, backend=tritium.Backend(EAGER), **kwargs)


def entry_of(compiled) -> dict:
    """What the report says about the pass, for the graph compiled last."""
    report = tritium.explain(compiled)
    assert report.failures == []
    return [entry for entry in report.passes if entry["name"] == "channels_last"][-1]


class Stack(nn.Module):
    """Three convolutions with what stands between them in a decoder."""

    def __init__(self, rank: int = 2, width: int = 8, between=None) -> None:
        super().__init__()
        kind = nn.Conv2d if rank == 2 else nn.Conv3d
        self.convs = nn.ModuleList(kind(width, width, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(4, width)
        self.between = between

    def forward(self, x):
        y = F.silu(self.norm(self.convs[0](x)))
        y = self.convs[1](y) + x
        if self.between is not None:
            y = self.between(y)
        return self.convs[2](y)


def image(rank: int = 2, width: int = 8, size: int = 6) -> torch.Tensor:
    return torch.randn(2, width, *[3] * (rank - 2), size, 8)
