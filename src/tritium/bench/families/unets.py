"""U-Nets, as pipelines call them with guidance: batch 2."""

from __future__ import annotations

from typing import Any

import torch

from tritium.bench.families.family import Family
from tritium.bench.transformers import Size
from tritium.bench.workload import Draw


def _unet_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    sample = draw(size.batch, config.in_channels, *size.grid)
    inputs: dict[str, Any] = {
        "sample": sample,
        # Schedulers give a timestep without dims.
        "timestep": torch.tensor(500, device=sample.device),
        "encoder_hidden_states": draw(size.batch, size.text, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        pixels = 8.0 * size.grid[0]
        times = torch.tensor([[pixels, pixels, 0.0, 0.0, pixels, pixels]] * size.batch)
        inputs["added_cond_kwargs"] = {"text_embeds": draw(size.batch, pooled), "time_ids": times.to(sample)}
    return inputs


_SDXL = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
_FEW_SDXL = {**_SDXL, "layers_per_block": 1, "transformer_layers_per_block": (1, 1, 2)}
_SMALL_SDXL = Size(
    {
        **_SDXL,
        "sample_size": 16,
        "layers_per_block": 1,
        "transformer_layers_per_block": 1,
        "block_out_channels": (32, 32, 64),
        "attention_head_dim": (2, 2, 4),
        "cross_attention_dim": 32,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
        "norm_num_groups": 8,
    },
    (16, 16),
    16,
    "one layer a level, channels 32, 32, 64, batch 2",
    batch=2,
)
SD15_512 = Family(
    name="sd15-512",
    class_name="UNet2DConditionModel",
    full=Size(
        {"sample_size": 64, "cross_attention_dim": 768, "layers_per_block": 1},
        (64, 64),
        77,
        "one layer a level instead of two, batch 2",
        batch=2,
    ),
    small=Size(
        {
            "sample_size": 16,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        },
        (16, 16),
        16,
        "two levels of one layer, channels 32, 64, batch 2",
        batch=2,
    ),
    inputs=_unet_inputs,
    budget=90.0,
)
SDXL_SHALLOW_512 = Family(
    name="sdxl-shallow-512",
    class_name="UNet2DConditionModel",
    full=Size(_FEW_SDXL, (64, 64), 77, "one layer a level instead of two, 1 or 2 transformer blocks, batch 2", batch=2),
    small=_SMALL_SDXL,
    inputs=_unet_inputs,
    budget=120.0,
    reduce_overhead=True,
)
SDXL = Family(
    name="sdxl",
    class_name="UNet2DConditionModel",
    full=Size(_SDXL, (128, 128), 77, "the whole U-Net, 1024 x 1024, batch 2", batch=2),
    small=_SMALL_SDXL,
    inputs=_unet_inputs,
    budget=450.0,
    reduce_overhead=True,
)

FAMILIES = (SD15_512, SDXL_SHALLOW_512, SDXL)
