"""Whole autoencoders of stock classes, tiny and with random weights, and latents for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from support import SEED

# Latent pixels of a side of a tile, once `tile` was called.
TILE = 6


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


def kl(**changes: Any) -> diffusers.AutoencoderKL:
    small = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return diffusers.AutoencoderKL(**(small | changes))


def wan(**changes: Any) -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(**(SMALL_WAN | {"scale_factor_spatial": 2} | changes))


def wan_residual() -> diffusers.AutoencoderKLWan:
    """As Wan 2.2 has it: shortcuts around the upsampling, and patches of pixels."""
    return wan(is_residual=True, dim_mult=[1, 1], patch_size=2, in_channels=12, out_channels=12)


def qwen_image() -> diffusers.AutoencoderKLQwenImage:
    return diffusers.AutoencoderKLQwenImage(**SMALL_WAN)


def hunyuan_video() -> diffusers.AutoencoderKLHunyuanVideo:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 2,
        up_block_types=("HunyuanVideoUpBlock3D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def ltx_video() -> diffusers.AutoencoderKLLTXVideo:
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
    )


def dc() -> diffusers.AutoencoderDC:
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
    )


@dataclass(frozen=True)
class SmallVae:
    """A tiny autoencoder: `latent(height, width)` is what its `decode` takes."""

    make: Callable[[], Any]
    channels: int
    # None for images.
    frames: int | None = None

    def build(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.make().eval().requires_grad_(requires_grad=False)

    def latent(self, height: int, width: int, *, batch: int = 1, frames: int | None = None) -> torch.Tensor:
        between = () if self.frames is None else (frames or self.frames,)
        generator = torch.Generator().manual_seed(height * 1000 + width)
        return torch.randn(batch, self.channels, *between, height, width, generator=generator)

    def image(self, height: int, width: int) -> torch.Tensor:
        """What its `encode` takes."""
        between = () if self.frames is None else (5,)
        generator = torch.Generator().manual_seed(height * 1000 + width)
        return torch.rand(1, 3, *between, height, width, generator=generator)


SMALL_VAES = {
    "kl": SmallVae(kl, 4),
    "wan": SmallVae(wan, 4, 3),
    "wan_residual": SmallVae(wan_residual, 4, 3),
    "qwen_image": SmallVae(qwen_image, 4, 1),
    "hunyuan_video": SmallVae(hunyuan_video, 4, 2),
    "ltx_video": SmallVae(ltx_video, 8, 2),
    "dc": SmallVae(dc, 4),
}


def tile(vae: Any) -> None:
    """Switch on tiling with tiles of `TILE` latent pixels a side that overlap by two."""
    if isinstance(vae, diffusers.AutoencoderKL):
        vae.enable_tiling()
        vae.tile_latent_min_size, vae.tile_sample_min_size, vae.tile_overlap_factor = TILE, TILE * 2, 2 / TILE
        return
    ratio = vae.spatial_compression_ratio
    sizes = {"min": TILE * ratio, "stride": (TILE - 2) * ratio}
    vae.enable_tiling(**{f"tile_sample_{kind}_{side}": n for kind, n in sizes.items() for side in ("height", "width")})


def decode(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return vae.decode(latent, return_dict=False)[0]
