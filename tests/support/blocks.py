"""A model of equal blocks, each large enough for a cut to pay."""

import torch
from torch import nn

import tritium
from tritium import Backend, CompilationConfig


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


class Scaled(Block):
    """A block with a number, which may become an input of graphs."""

    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def forward(self, x, temb):
        return super().forward(x * self.factor, temb)


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


EAGER = CompilationConfig(reuse_blocks=True, engine="eager")


def model_of(kind, count=6, **arguments):
    torch.manual_seed(0)
    return Model(*(kind(**arguments) for _ in range(count))).requires_grad_(False)


def reuse(compiled):
    """What the pass says of each graph."""
    passes = [entry for record in tritium.explain(compiled).records for entry in record.passes]
    return [entry for entry in passes if entry.name == "reuse_blocks"]


def check(model, *calls, config=EAGER, **options):
    """The compiled model gives eager's numbers and changes inputs as eager does; returns what the pass says."""
    compiled = torch.compile(model, backend=Backend(config), fullgraph=True, **options)
    with torch.no_grad():
        for call in calls or [inputs()]:
            mine, theirs = ([part.clone() for part in call] for _ in range(2))
            torch.testing.assert_close(compiled(*mine), model(*theirs), atol=0, rtol=0)
            torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    entries = reuse(compiled)
    assert all(entry.failed is None for entry in entries)
    return entries


def counts(entry):
    """Pieces, and those of them that were compiled."""
    assert entry.summary is not None, entry.declined
    words = entry.summary.split()
    return int(words[0]), int(words[2])
