"""A pipeline with one denoiser of two equal blocks: compiles in a fraction of the time of a stock one."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        return hidden_states + self.linear(self.norm(hidden_states))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden_states, guidance=None, scale=1.0, *, return_dict=True):
        hidden_states = self.embedder(hidden_states) * scale
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return {"sample": hidden_states} if return_dict else (hidden_states,)


class Pipeline:
    """Calls its denoiser on `height * width / 16` tokens."""

    def __init__(self, **components: nn.Module | None) -> None:
        torch.manual_seed(0)
        self.components = {"transformer": Denoiser().eval(), **components}
        self.transformer = self.components["transformer"]

    device = torch.device("cpu")

    def __call__(
        self,
        *,
        height,
        width,
        num_images_per_prompt=1,
        num_inference_steps=2,
        max_sequence_length=8,
        generator=None,
    ):
        tokens = height * width // 16
        hidden_states = torch.randn(num_images_per_prompt, tokens, WIDTH, generator=generator)
        with torch.no_grad():
            for _ in range(num_inference_steps):
                (hidden_states,) = self.transformer(hidden_states, guidance=None, return_dict=False)
        return hidden_states
