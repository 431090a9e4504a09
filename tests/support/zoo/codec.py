"""Convolutional models of the zoo: SDXL's UNet and the decoders of two autoencoders."""

import diffusers
import torch

from support.zoo.model import Source, ZooModel, builder


def _sdxl_unet() -> torch.nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        attention_head_dim=(1, 2, 2),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        cross_attention_dim=16,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=8 + 6 * 4,
        norm_num_groups=4,
    )


def _sdxl_unet_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "sample": source.normal(2, 4, size, 8),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "added_cond_kwargs": {"text_embeds": source.normal(2, 8), "time_ids": source.full(64.0, 2, 6)},
        "return_dict": False,
    }


def _kl_decoder() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ).decoder


def _kl_decoder_inputs(dtype=torch.float32, size=8):
    return {"sample": Source(dtype).normal(2, 4, size, 8)}


# Wan's autoencoder, and Qwen-Image's, which is built like it.
SMALL_WAN = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def _wan_decoder() -> torch.nn.Module:
    return diffusers.AutoencoderKLWan(**SMALL_WAN).decoder


def _wan_decoder_inputs(dtype=torch.float32, size=8):
    return {"x": Source(dtype).normal(2, 4, 2, size, 8)}


MODELS = (
    ZooModel("sdxl_unet", builder(_sdxl_unet), _sdxl_unet_inputs, (8, 12), False, {"sample": (2,)}),
    ZooModel("kl_decoder", builder(_kl_decoder), _kl_decoder_inputs, (8, 12), False, {"sample": (2,)}),
    ZooModel(
        "wan_decoder",
        builder(_wan_decoder),
        _wan_decoder_inputs,
        (8, 12),
        False,
        {"x": (3,)},
        notes="Called without the feature cache: all frames at once, no temporal upsampling.",
    ),
)
