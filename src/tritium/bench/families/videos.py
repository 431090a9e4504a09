"""Video transformers: latents of common sizes, fewer frames where attention alone would fill the time."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch

from tritium.bench.families.family import Family
from tritium.bench.transformers import Size, wan_inputs
from tritium.bench.workload import Draw


def _wan_per_token_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    inputs = wan_inputs(config, size, draw)
    frames, height, width = (extent // patch for extent, patch in zip(size.grid, config.patch_size, strict=True))
    # An image to a video: the first frame is given, so its tokens are at time 0.
    times = torch.full((size.batch, frames * height * width), 500.0, device=inputs["timestep"].device)
    times[:, : height * width] = 0
    return {**inputs, "timestep": times}


def _ltx_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    frames, height, width = size.grid
    hidden = draw(size.batch, frames * height * width, config.in_channels)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.caption_channels),
        "timestep": torch.full((size.batch,), 500.0, device=hidden.device),
        "encoder_attention_mask": torch.ones(size.batch, size.text, dtype=torch.int64, device=hidden.device),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _hunyuan_video_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "timestep": torch.full((size.batch,), 500.0, device=hidden.device).to(hidden.dtype),
        "encoder_hidden_states": draw(size.batch, size.text, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(size.batch, size.text, dtype=torch.int64, device=hidden.device),
        "pooled_projections": draw(size.batch, config.pooled_projection_dim),
        "guidance": torch.full((size.batch,), 6000.0, device=hidden.device).to(hidden.dtype),
    }


def _cogvideox_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    frames, height, width = size.grid
    hidden = draw(size.batch, frames, config.in_channels, height, width)
    embeddings: Any = importlib.import_module("diffusers.models.embeddings")
    grid = (height // config.patch_size, width // config.patch_size)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.text_embed_dim),
        "timestep": torch.full((size.batch,), 500, device=hidden.device),
        "image_rotary_emb": embeddings.get_3d_rotary_pos_embed(
            config.attention_head_dim, ((0, 0), grid), grid, frames, device=hidden.device
        ),
    }


_SMALL_WAN = Size(
    {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 48,
        "freq_dim": 32,
        "ffn_dim": 128,
        "num_layers": 1,
        "rope_max_seq_len": 64,
    },
    (3, 8, 8),
    16,
    "1 block, width 64, 48 + 16 tokens",
)
WAN = Family(
    name="wan",
    class_name="WanTransformer3DModel",
    # The model of 1.3 B parameters at 41 frames of 480 x 832.
    full=Size(
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 4},
        (11, 60, 104),
        512,
        "4 blocks, width 1536, 17160 + 512 tokens",
    ),
    small=_SMALL_WAN,
    inputs=wan_inputs,
    tokens=17672,
)
WAN_PER_TOKEN = Family(
    name="wan-per-token",
    class_name="WanTransformer3DModel",
    # Wan 2.2 TI2V 5B at 53 frames of 704 x 1280, from an image.
    full=Size(
        {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 3},
        (14, 44, 80),
        512,
        "3 blocks, width 3072, 12320 + 512 tokens, a timestep per token",
    ),
    small=replace(_SMALL_WAN, note="1 block, width 64, 48 + 16 tokens, a timestep per token"),
    inputs=_wan_per_token_inputs,
    tokens=12832,
)
LTX_512 = Family(
    name="ltx-512",
    class_name="LTXVideoTransformer3DModel",
    # 65 frames of 512 x 704.
    full=Size({"num_layers": 5}, (9, 16, 22), 128, "5 blocks, width 2048, batch 2, 3168 + 128 tokens", batch=2),
    small=Size(
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "cross_attention_dim": 64,
            "num_layers": 1,
            "caption_channels": 48,
        },
        (3, 4, 4),
        16,
        "1 block, width 64, batch 2, 48 + 16 tokens",
        batch=2,
    ),
    inputs=_ltx_inputs,
    tokens=3296,
)
HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    class_name="HunyuanVideoTransformer3DModel",
    # 33 frames of 544 x 960.
    full=Size(
        {"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1},
        (9, 68, 120),
        256,
        "1 double + 2 single blocks, width 3072, 18360 + 256 tokens",
    ),
    small=Size(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 48,
            "pooled_projection_dim": 32,
            "rope_axes_dim": (8, 12, 12),
        },
        (3, 8, 8),
        16,
        "1 double + 1 single block, width 64, 48 + 16 tokens",
    ),
    inputs=_hunyuan_video_inputs,
    tokens=18616,
)
COGVIDEOX = Family(
    name="cogvideox",
    class_name="CogVideoXTransformer3DModel",
    # The model of 5 B parameters at 25 frames of 480 x 720, with guidance.
    full=Size(
        {"num_attention_heads": 48, "num_layers": 2, "use_rotary_positional_embeddings": True},
        (7, 60, 90),
        226,
        "2 blocks, width 3072, batch 2, 9450 + 226 tokens",
        batch=2,
    ),
    small=Size(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 32,
            "text_embed_dim": 48,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 16,
            "use_rotary_positional_embeddings": True,
        },
        (3, 8, 8),
        16,
        "1 block, width 64, batch 2, 48 + 16 tokens",
        batch=2,
    ),
    inputs=_cogvideox_inputs,
    tokens=9676,
)

FAMILIES = (WAN, WAN_PER_TOKEN, LTX_512, HUNYUAN_VIDEO, COGVIDEOX)
