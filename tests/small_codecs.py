"""Tiny decoders of stock autoencoders beside those of the zoo: what a change of layout is tried on."""

import diffusers
import torch

from zoo_codec import MODELS, SMALL_WAN
from zoo_model import SEED, Source, ZooModel, builder


def wan() -> torch.nn.Module:
    """A whole autoencoder, whose `decode` calls its decoder frame by frame."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return diffusers.AutoencoderKLWan(**SMALL_WAN).eval()


def _ltx() -> torch.nn.Module:
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 16),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        downsample_type=("conv", "conv"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
    ).decoder


def _hunyuan() -> torch.nn.Module:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 2,
        up_block_types=("HunyuanVideoUpBlock3D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    ).decoder


def _dc() -> torch.nn.Module:
    return diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    ).decoder


def _qwen_image() -> torch.nn.Module:
    return diffusers.AutoencoderKLQwenImage(**SMALL_WAN).decoder


def _kl_encoder() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ).encoder


def _video(name: str, channels: int):
    def inputs(dtype=torch.float32, size=8):
        return {name: Source(dtype).normal(2, channels, 2, size, 8)}

    return inputs


def _image(name: str, channels: int):
    def inputs(dtype=torch.float32, size=8):
        return {name: Source(dtype).normal(2, channels, size, 8)}

    return inputs


CODECS: dict[str, ZooModel] = {
    model.name: model
    for model in (
        *MODELS,
        ZooModel("ltx_decoder", builder(_ltx), _video("hidden_states", 8), (8, 12), False, {"hidden_states": (3,)}),
        ZooModel(
            "hunyuan_decoder", builder(_hunyuan), _video("hidden_states", 4), (8, 12), False, {"hidden_states": (3,)}
        ),
        ZooModel("dc_decoder", builder(_dc), _image("hidden_states", 4), (8, 12), False, {"hidden_states": (2,)}),
        ZooModel("qwen_image_decoder", builder(_qwen_image), _video("x", 4), (8, 12), False, {"x": (3,)}),
        ZooModel("kl_encoder", builder(_kl_encoder), _image("sample", 3), (8, 12), False, {"sample": (2,)}),
    )
}
