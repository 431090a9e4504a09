"""Denoising loops around small denoisers, and denoisers whose outputs are known functions of the step."""

from __future__ import annotations

import diffusers
import torch
from torch import nn

import tritium
from tritium import CompilationConfig, Plan

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.executed = 0

    def forward(self, hidden_states, scale=1.0):
        return hidden_states + scale * torch.tanh(self.linear(hidden_states))


class Denoiser(nn.Module):
    """A few equal blocks; depends on the latent, the time and a condition."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.condition = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, timestep, condition=0.0, *, return_dict=False):
        time = self.condition(timestep.reshape(1, 1).to(hidden_states.dtype) / 1000)
        hidden_states = hidden_states + time + condition
        for block in self.blocks:
            hidden_states = block(hidden_states)
        sample = self.head(hidden_states)
        return {"sample": sample} if return_dict else (sample,)


class Known(nn.Module):
    """Returns a function of its scheduler's step, and keeps the steps in which it ran."""

    def __init__(self, scheduler, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.scheduler, self.function = scheduler, function
        self.ran: list[int] = []

    def forward(self, hidden_states, timestep, condition=0.0):
        step = self.scheduler.step_index
        step = (self.scheduler.begin_index or 0) if step is None else step
        self.ran.append(step)
        return (torch.ones_like(hidden_states) * self.function(step, condition),)


def euler(**fields):
    return diffusers.FlowMatchEulerDiscreteScheduler(**fields)


def plan(skip, **fields):
    fields = {"config": CompilationConfig(engine="eager"), "components": {"model": "eager"}, **fields}
    return Plan(progress=False, skip=skip, **fields)


def optimized(model, skip, scheduler, **fields):
    return tritium.optimize(model, plan(skip, **fields), scheduler=scheduler)


def count_blocks(model) -> list[int]:
    """Count the executions of each block by hooks, in the list that is returned."""
    counts = [0] * len(model.blocks)

    def hook(place):
        def count(*_):
            counts[place] += 1

        return count

    for place, block in enumerate(model.blocks):
        block.register_forward_hook(hook(place))
    return counts


@torch.no_grad()
def generate(
    model,
    scheduler,
    *,
    steps=8,
    seed=0,
    guidance=(0.0,),
    begin=0,
    tokens=3,
    dtype=torch.float32,
    stop=None,
    outputs=None,
    timesteps=True,
):
    """Denoise noise, with one call of the model a step for every guidance; raise after `stop` calls."""
    latents = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if timesteps:
        scheduler.set_timesteps(steps)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
    calls = 0
    for time in scheduler.timesteps[begin:]:
        total = 0
        for place, condition in enumerate(guidance):
            if calls == stop:
                raise InterruptedError
            (output,) = model(latents, time, condition)
            calls += 1
            if outputs is not None:
                outputs.append(output.clone())
            total = total + (1.5 if place == 0 else -0.5) * output if len(guidance) > 1 else output
        latents = scheduler.step(total, time, latents, return_dict=False)[0]
        # A capture copies its results for good once one is held over the next call.
        del output, total
    return latents
