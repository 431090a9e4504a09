"""Decoders of autoencoders as workloads: latents to pixels, with static and with dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from tritium import compat
from tritium.bench.comparison import twin
from tritium.bench.models import cast_as_loading_does, diffusers, seeded
from tritium.bench.workload import Built, Compile, Normals, whole


@dataclass(frozen=True)
class Size:
    """A configuration, and the shape of the latents."""

    config: Mapping[str, Any]
    latents: tuple[int, ...]
    note: str


@dataclass(frozen=True)
class Decoder:
    """One decoder in two sizes."""

    name: str
    full: Size
    small: Size
    make: Callable[[Mapping[str, Any]], nn.Module]
    argument: str
    install: Callable[[Any, Compile], Any] = whole
    # Dynamic by marks on these dims of the latents; by torch.compile(dynamic=True) if None.
    dims: tuple[int, ...] | None = None
    dynamic: Sequence[bool] = (False, True)

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        size = self.small if small else self.full
        model = seeded(lambda: self.make(size.config), device)
        cast_as_loading_does(model, dtype)
        dims = None if self.dims is None else {self.argument: self.dims}
        latents = {self.argument: Normals(device, dtype)(*size.latents)}
        return Built(model, latents, size.note, small, install=self.install, dims=dims)

    def sizes(self, *, small: bool) -> list[tuple[int, ...]]:
        """List twelve other latent shapes, as from requests with changing sizes and aspect ratios."""
        *leading, height, width = (self.small if small else self.full).latents
        eighths = ((8, 6), (6, 8), (7, 5), (5, 7), (6, 6), (4, 8), (8, 4), (7, 7), (5, 5), (6, 4), (4, 6), (7, 8))
        return [(*leading, height * tall // 8, width * wide // 8) for tall, wide in eighths]


def autoencoder_kl(config: Mapping[str, Any]) -> Any:
    """Make an AutoencoderKL of plain blocks, one for each width."""
    levels = len(config["block_out_channels"])
    types = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
    }
    return diffusers().AutoencoderKL(**types, **config)


def _decode(vae: Any, compile_: Compile) -> Callable[..., Any]:
    """Return `vae.decode` with a compiled decoder; the loop over frames and its cache stay in Python, as in stock code."""
    copied = twin(vae)
    copied.decoder = compile_(_with_new_code(copied.decoder))

    def decode(z: torch.Tensor) -> torch.Tensor:
        return copied.decode(z, return_dict=False)[0]  # type: ignore[no-any-return]

    return decode


def _with_new_code(module: nn.Module) -> nn.Module:
    """Give a module a `forward` that is new to Dynamo.

    What Dynamo learns about one variant holds for all modules with that code: before torch 2.13 it skips Wan's decoder
    under plain torch.compile, and would not try again for the other variants.
    """
    cls: Any = type(module)
    forward = compat.dynamo.with_code_of_its_own(cls.forward)
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return module


class Residual(nn.Module):
    """Twice norm, activation and convolution, with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            hidden = conv(F.silu(norm(hidden)))
        return x + hidden


class VideoDecoder(nn.Module):
    """A plain video decoder: three residual blocks with upsampling by two between them."""

    def __init__(self, latent: int, channels: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv3d(latent, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(3))
        self.conv_out = nn.Conv3d(channels, 3, 3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(latents)
        for index, block in enumerate(self.blocks):
            if index:
                x = F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest")
            x = block(x)
        return self.conv_out(x)  # type: ignore[no-any-return]


KL_DECODE = Decoder(
    name="kl-decode",
    # FLUX.1's autoencoder at 1024 x 1024.
    full=Size(
        config={"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16},
        latents=(1, 16, 128, 128),
        note="decoder of AutoencoderKL, 1024 x 1024",
    ),
    small=Size(
        config={"block_out_channels": (32, 64), "layers_per_block": 1, "latent_channels": 4},
        latents=(1, 4, 32, 32),
        note="decoder of AutoencoderKL, 64 x 64",
    ),
    make=lambda config: autoencoder_kl(config).decoder,
    argument="sample",
)

WAN_DECODE = Decoder(
    name="wan-decode",
    full=Size(config={}, latents=(1, 16, 5, 68, 120), note="AutoencoderKLWan.decode, 17 frames of 544 x 960"),
    small=Size(
        config={
            "base_dim": 16,
            "z_dim": 4,
            "dim_mult": [1, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        latents=(1, 4, 3, 8, 8),
        note="AutoencoderKLWan.decode, 5 frames of 16 x 16",
    ),
    make=lambda config: diffusers().AutoencoderKLWan(**config),
    argument="z",
    install=_decode,
)

VAE_LIKE = Decoder(
    name="vae-like",
    full=Size(config={"latent": 48, "channels": 128}, latents=(1, 48, 7, 34, 60), note="7 frames of 136 x 240"),
    small=Size(config={"latent": 4, "channels": 32}, latents=(1, 4, 2, 8, 8), note="2 frames of 32 x 32"),
    make=lambda config: VideoDecoder(**config),
    argument="latents",
    dims=(3, 4),
)

DECODERS = (KL_DECODE, WAN_DECODE, VAE_LIKE)
