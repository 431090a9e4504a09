"""Small modules and a small stock FLUX for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """An RMSNorm, a linear and a gated residual: the two fusions of a block, once each."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, width)

    def forward(self, x, gate, flag=True, bias=None, scale=1.0):
        y = self.linear(self.norm(x)) * scale
        if bias is not None:
            y = y + bias
        out = x + gate[:, None] * y
        return out if flag else out - x


class Stack(nn.Module):
    """Equal blocks with different weights."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x, gate):
        for block in self.blocks:
            x = block(x, gate)
        return x


def block_inputs(width: int = 16, batch: int = 2, tokens: int = 7, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, tokens, width, generator=generator)
    gate = torch.randn(batch, width, generator=generator)
    return x.to(dtype), gate.to(dtype)


def flux(layers: int = 1, single_layers: int = 1, heads: int = 2) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def flux_inputs(tokens: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden_states": random(1, tokens, 4),
        "encoder_hidden_states": random(1, 8, 32),
        "pooled_projections": random(1, 32),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": random(tokens, 3),
        "txt_ids": random(8, 3),
        "return_dict": False,
    }


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 32, "text_dim": 16}
    return WanTransformer3DModel(**sizes, freq_dim=32, rope_max_seq_len=32).eval()


def wan_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    scales = {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}
    return AutoencoderKLWan(base_dim=4, dim_mult=[1, 1], num_res_blocks=1, **scales).eval()
