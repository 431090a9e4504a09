"""A model of equal blocks, each large enough for a cut to pay."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual block of about sixty operations, so that a cut pays."""

    def __init__(self, width=16, eps=1e-6):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps, elementwise_affine=False)
        self.table = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, temb):
        shift, scale, gate = self.table(nn.functional.silu(temb))[:, None].chunk(3, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        left, right = self.up(y).chunk(2, dim=-1)
        for _ in range(12):
            left, right = right.sin() + 0.1, left.cos()
        y = torch.cat([left * 2, right.tanh()], dim=-1)
        return x + gate * self.down(y)


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, temb):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, temb)
        return self.leave(x)


def inputs(batch=2, tokens=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, 16, generator=generator), torch.randn(batch, 16, generator=generator)
