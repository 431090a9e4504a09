"""Image transformers. Names with `512` are at 512 x 512 pixels, the others at 1024 x 1024."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tritium.bench import transformers
from tritium.bench.families.family import Family
from tritium.bench.transformers import Size, flux_inputs, pixart_inputs, qwen_image_inputs, sd3_inputs
from tritium.bench.workload import Draw


def _flux2_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    height, width = size.grid
    hidden = draw(size.batch, height * width, config.in_channels)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    zeros = torch.zeros_like(rows)
    image_ids = torch.stack([zeros, rows, columns, zeros], dim=-1).reshape(1, -1, 4)
    text_ids = torch.zeros(1, size.text, 4, dtype=torch.int64)
    text_ids[..., 3] = torch.arange(size.text)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "timestep": torch.full_like(hidden[:, 0, 0], 0.5),
        "img_ids": image_ids.expand(size.batch, -1, -1).to(hidden.device),
        "txt_ids": text_ids.expand(size.batch, -1, -1).to(hidden.device),
        "guidance": torch.full((size.batch,), 3.5, device=hidden.device),
    }


def _chroma_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    height, width = size.grid
    hidden = draw(size.batch, height * width, config.in_channels)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    # A quarter of the prompt's tokens are words: the pipeline masks the others.
    seen = torch.ones(size.batch, size.text + height * width, dtype=torch.bool)
    seen[:, size.text // 4 : size.text] = False
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "timestep": torch.full_like(hidden[:, 0, 0], 0.5),
        "img_ids": ids.to(hidden),
        "txt_ids": torch.zeros(size.text, 3).to(hidden),
        "attention_mask": seen.to(hidden.device),
    }


def _sana_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.caption_channels),
        "encoder_attention_mask": torch.ones(size.batch, size.text, dtype=torch.int64, device=hidden.device),
        "timestep": torch.full((size.batch,), 500.0, device=hidden.device),
    }


def _dit_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "timestep": torch.full((size.batch,), 500, device=hidden.device),
        "class_labels": torch.full((size.batch,), 3, device=hidden.device),
    }


def _lumina2_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "timestep": torch.full((size.batch,), 0.5, device=hidden.device),
        "encoder_hidden_states": draw(size.batch, size.text, config.cap_feat_dim),
        "encoder_attention_mask": torch.ones(size.batch, size.text, dtype=torch.bool, device=hidden.device),
    }


def _z_image_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    images = [draw(config.in_channels, 1, *size.grid) for _ in range(size.batch)]
    return {
        "x": images,
        "t": torch.full((size.batch,), 0.5, device=images[0].device),
        "cap_feats": [draw(size.text, config.cap_feat_dim) for _ in range(size.batch)],
    }


def _auraflow_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "timestep": torch.full((size.batch,), 0.5, device=hidden.device).to(hidden.dtype),
    }


def _cogview4_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    pixels = torch.tensor([[8.0 * extent for extent in size.grid]] * size.batch).to(hidden)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.text_embed_dim),
        "timestep": torch.full((size.batch,), 500, device=hidden.device),
        "original_size": pixels,
        "target_size": pixels,
        "crop_coords": torch.zeros_like(pixels),
    }


_FLUX_CONFIG = {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True}
_TINY_FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (8, 12, 12),
}
_SMALL_FLUX = Size(
    config=_TINY_FLUX | {"pooled_projection_dim": 32, "guidance_embeds": True},
    grid=(8, 8),
    text=16,
    note="1 double + 1 single block, width 64, 64 + 16 tokens",
)

FLUX = Family(
    name="flux",
    class_name="FluxTransformer2DModel",
    full=Size(_FLUX_CONFIG, (64, 64), 512, "2 double + 4 single blocks, width 3072, 4096 + 512 tokens"),
    small=_SMALL_FLUX,
    inputs=flux_inputs,
    tokens=4608,
)
FLUX_512 = replace(
    FLUX,
    name="flux-512",
    full=Size(_FLUX_CONFIG, (32, 32), 512, "2 double + 4 single blocks, width 3072, 1024 + 512 tokens"),
    tokens=1536,
)
FLUX2_512 = Family(
    name="flux2-512",
    class_name="Flux2Transformer2DModel",
    full=Size(
        {"num_layers": 1, "num_single_layers": 3},
        (32, 32),
        512,
        "1 double + 3 single blocks, width 6144, 1024 + 512 tokens",
    ),
    small=Size(
        {**_TINY_FLUX, "timestep_guidance_channels": 32, "axes_dims_rope": (8, 8, 8, 8)},
        (8, 8),
        16,
        "1 double + 1 single block, width 64, 64 + 16 tokens",
    ),
    inputs=_flux2_inputs,
    tokens=1536,
)
QWEN_IMAGE_512 = Family(
    name="qwen-image-512",
    class_name="QwenImageTransformer2DModel",
    full=Size({"num_layers": 4}, (32, 32), 256, "4 blocks, width 3072, batch 2, 1024 + 256 tokens", batch=2),
    small=Size(
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 48,
            "axes_dims_rope": (8, 12, 12),
        },
        (8, 8),
        16,
        "1 block, width 64, batch 2, 64 + 16 tokens",
        batch=2,
    ),
    inputs=qwen_image_inputs,
    tokens=1280,
)
QWEN_IMAGE = replace(
    QWEN_IMAGE_512,
    name="qwen-image",
    full=Size({"num_layers": 3}, (64, 64), 256, "3 blocks, width 3072, 4096 + 256 tokens"),
    tokens=4352,
)
SD3_512 = Family(
    name="sd3-512",
    class_name="SD3Transformer2DModel",
    # Stable Diffusion 3.5 large.
    full=Size(
        {**transformers.SD3.full.config, "num_layers": 4},
        (64, 64),
        333,
        "4 blocks, width 2432, batch 2, 1024 + 333 tokens",
        batch=2,
    ),
    small=Size(
        {
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 48,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
        },
        (16, 16),
        16,
        "1 block, width 64, batch 2, 64 + 16 tokens",
        batch=2,
    ),
    inputs=sd3_inputs,
    tokens=1357,
)
CHROMA = Family(
    name="chroma",
    class_name="ChromaTransformer2DModel",
    full=Size(
        {"num_layers": 2, "num_single_layers": 4},
        (64, 64),
        512,
        "2 double + 4 single blocks, width 3072, 4096 + 512 tokens, masked prompt",
    ),
    small=Size(
        {
            **_TINY_FLUX,
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 32,
            "approximator_layers": 1,
        },
        (8, 8),
        16,
        "1 double + 1 single block, width 64, 64 + 16 tokens, masked prompt",
    ),
    inputs=_chroma_inputs,
    tokens=4608,
    # Inductor compiles its approximator for a minute.
    budget=150.0,
)
PIXART_512 = Family(
    name="pixart-512",
    class_name="PixArtTransformer2DModel",
    # PixArt-Sigma.
    full=Size(
        transformers.PIXART.full.config, (64, 64), 300, "8 blocks, width 1152, batch 2, 1024 + 300 tokens", batch=2
    ),
    small=Size(transformers.PIXART.small.config, (16, 16), 32, "2 blocks, width 128, batch 2, 64 + 32 tokens", batch=2),
    inputs=pixart_inputs,
    tokens=1324,
)
SANA = Family(
    name="sana",
    class_name="SanaTransformer2DModel",
    # The model of 1.6 B parameters, whose autoencoder compresses 32 times.
    full=Size({"num_layers": 4}, (32, 32), 300, "4 blocks, width 2240, batch 2, 1024 + 300 tokens", batch=2),
    small=Size(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
            "caption_channels": 48,
            "sample_size": 8,
        },
        (8, 8),
        16,
        "1 block, width 64, batch 2, 64 + 16 tokens",
        batch=2,
    ),
    inputs=_sana_inputs,
    tokens=1324,
)
DIT_512 = Family(
    name="dit-512",
    class_name="DiTTransformer2DModel",
    # DiT-XL/2.
    full=Size(
        {"num_layers": 8, "sample_size": 64, "out_channels": 8},
        (64, 64),
        0,
        "8 blocks, width 1152, batch 2, 1024 tokens",
        batch=2,
    ),
    small=Size(
        {"num_attention_heads": 2, "attention_head_dim": 16, "out_channels": 8, "num_layers": 1, "sample_size": 16},
        (16, 16),
        0,
        "1 block, width 32, batch 2, 64 tokens",
        batch=2,
    ),
    inputs=_dit_inputs,
    tokens=1024,
)
LUMINA2 = Family(
    name="lumina2",
    class_name="Lumina2Transformer2DModel",
    full=Size(
        {"num_layers": 3, "num_refiner_layers": 1, "cap_feat_dim": 2304},
        (128, 128),
        256,
        "3 blocks and 2 refiners, width 2304, 4096 + 256 tokens",
    ),
    small=Size(
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (64, 64, 64),
            "cap_feat_dim": 32,
        },
        (16, 16),
        16,
        "1 block and 2 refiners, width 48, 64 + 16 tokens",
    ),
    inputs=_lumina2_inputs,
    tokens=4352,
)
Z_IMAGE = Family(
    name="z-image",
    class_name="ZImageTransformer2DModel",
    full=Size(
        {"n_layers": 3, "n_refiner_layers": 1}, (128, 128), 96, "3 blocks and 2 refiners, width 3840, 4096 + 96 tokens"
    ),
    small=Size(
        {
            "in_channels": 4,
            "dim": 64,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 32,
            "axes_dims": [8, 12, 12],
            "axes_lens": [256, 32, 32],
        },
        (16, 16),
        32,
        "1 block and 2 refiners, width 64, 64 + 32 tokens",
    ),
    inputs=_z_image_inputs,
    tokens=4192,
)
AURAFLOW_512 = Family(
    name="auraflow-512",
    class_name="AuraFlowTransformer2DModel",
    full=Size(
        {"num_mmdit_layers": 1, "num_single_dit_layers": 4, "pos_embed_max_size": 9216},
        (64, 64),
        256,
        "1 double + 4 single blocks, width 3072, batch 2, 1024 + 256 tokens",
        batch=2,
    ),
    small=Size(
        {
            "sample_size": 16,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "caption_projection_dim": 64,
            "joint_attention_dim": 48,
            "pos_embed_max_size": 256,
        },
        (16, 16),
        16,
        "1 double + 1 single block, width 64, batch 2, 64 + 16 tokens",
        batch=2,
    ),
    inputs=_auraflow_inputs,
    tokens=1280,
)
COGVIEW4 = Family(
    name="cogview4",
    class_name="CogView4Transformer2DModel",
    full=Size(
        {
            "num_layers": 3,
            "attention_head_dim": 128,
            "num_attention_heads": 32,
            "rope_axes_dim": (256, 256),
        },
        (128, 128),
        224,
        "3 blocks, width 4096, 4096 + 224 tokens",
    ),
    small=Size(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "text_embed_dim": 48,
            "time_embed_dim": 32,
            "condition_dim": 8,
            "sample_size": 16,
            "rope_axes_dim": (16, 16),
        },
        (16, 16),
        16,
        "1 block, width 64, 64 + 16 tokens",
    ),
    inputs=_cogview4_inputs,
    tokens=4320,
)

FAMILIES = (
    *(FLUX_512, FLUX, FLUX2_512, QWEN_IMAGE_512, QWEN_IMAGE, SD3_512, CHROMA, PIXART_512, SANA, DIT_512, Z_IMAGE),
    *(LUMINA2, AURAFLOW_512, COGVIEW4),
)
