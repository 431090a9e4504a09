"""A model of equal blocks whose weights take turns on the device, and what its calls hold there."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn

import tritium
from tritium import CompilationConfig
from tritium.compat.tensors import TorchDispatchMode, keep_storage_id, leaves_of, storage_id
from tritium.techniques.choice import Choice
from tritium.techniques.memory.units import module_bytes

WIDTH = 32


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Runs its blocks in `order`, which is that of the list at first."""

    def __init__(self, blocks=6, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.order = list(range(blocks))
        self.eval()

    def forward(self, x):
        x = self.embed(x)
        for place in self.order:
            x = self.blocks[place](x)
        return x


@functools.cache
def block_size():
    """The bytes of a block in its slot."""
    # Every tensor begins at a multiple of 512 bytes.
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in Block().parameters())


def tokens(count=8, width=WIDTH):
    return torch.randn(2, count, width, generator=torch.Generator().manual_seed(1))


def budget(model, resident, *, slots=2, activations=24_000):
    """Return a budget for some resident blocks beside the slots."""
    return module_bytes(model.embed) + 1024 + (resident + slots) * block_size() + activations


def plan(size, *, how="tritium", graphs="off", slots=None, **techniques):
    config = CompilationConfig(engine="eager")
    memory = tritium.Memory(size, slots=slots) if isinstance(size, (int, str)) else size
    choice = Choice(how=how, memory=memory, **({"graphs": graphs} if how == "tritium" else {}), **techniques)
    return tritium.Plan(components={"model": choice}, progress=False, config=config)


def note(handle, name="model"):
    """Return what the report says about the memory of a part."""
    return next(part.techniques["memory"] for part in handle.components if part.name == name)


class Held(TorchDispatchMode):
    """Count the bytes of tensors created inside, and of the memory on the emulated device."""

    def __init__(self, link):
        super().__init__()
        self.link, self.live, self.most = link, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage_id(leaf) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and (storage := storage_id(leaf)) not in given - self.live.keys():
                self.live.setdefault(storage, (keep_storage_id(leaf), leaf.untyped_storage().nbytes()))
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        own = {storage_id(buffer) for buffer in self.link._held}
        live = sum(size for storage, (_, size) in self.live.items() if storage not in own)
        self.most = max(self.most, self.link.allocated() + live)
        return result


@contextlib.contextmanager
def optimized(model, *args, **kwargs):
    with tritium.optimize(model, plan(*args, **kwargs)) as handle, torch.no_grad():
        yield handle
