"""Small regions of diffusion models whose generated kernels are slow with dynamic sizes, each a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from tritium.bench.models import roughen
from tritium.bench.workload import SEED, Built, Normals

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Kernel:
    """One region: its function, its shape and its dynamic dims."""

    what: str
    make: Callable[[Normals], Callable[[torch.Tensor], torch.Tensor]]
    shape: tuple[int, ...]
    small: tuple[int, ...]
    dims: tuple[int, ...]
    channels_last: bool = False
    dynamic: Sequence[bool] = (True,)

    @property
    def name(self) -> str:
        return f"kernel {self.what}"

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        normal = Normals(device, dtype)
        shape = self.small if small else self.shape
        x = normal(*shape)
        if self.channels_last:
            x = x.contiguous(memory_format=FORMATS[x.dim()])
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            model: Any = self.make(normal)
            if isinstance(model, nn.Module):
                roughen(model)
                model.eval().to(device, dtype)
        note = " x ".join(map(str, shape)) + (", channels-last" if self.channels_last else "")
        return Built(model, {"x": x}, note, small, dims={"x": self.dims}, against_static=True)


class Convolved(nn.Module):
    """Three times norm, activation and convolution around a residual."""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        conv: Any = nn.Conv3d if rank == 3 else nn.Conv2d
        self.convs = nn.ModuleList(conv(channels, channels, 3, padding=1 if rank == 2 else 0) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(3))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(channels, 1, 1, 1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm, gain in zip(self.convs, self.norms, self.gains, strict=True):
            hidden = _pad(F.silu(F.normalize(x, dim=1) * gain)) if self.rank == 3 else F.silu(norm(x))
            x = x + conv(hidden)
        return x


def _pad(x: torch.Tensor) -> torch.Tensor:
    """Pad by one pixel on each side and two frames in front, for a causal convolution of 3."""
    return F.pad(x, (1, 1, 1, 1, 2, 0))


def _after_frames(x: torch.Tensor) -> torch.Tensor:
    """Pad with frames kept from the last call, as Wan's decoder does from its second call on."""
    return F.pad(torch.cat([x[:, :, -2:], x], dim=2), (1, 1, 1, 1))


def _channel_norm(x: torch.Tensor) -> torch.Tensor:
    """The norm and activation before each convolution of Wan's autoencoder."""
    return F.silu(F.normalize(x, dim=1) * x.shape[1] ** 0.5)


def _patches(x: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    squares = x.view(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels) * 2


def _split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 3, -1, 64).permute(2, 0, 3, 1, 4).contiguous()


def _rope(normal: Normals) -> Callable[[torch.Tensor], torch.Tensor]:
    table = normal(1, 16384, 1, 64).float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([-imaginary, real], -1).flatten(3)
        part = table[:, : x.shape[1]]
        return (x.float() * part + rotated.float() * part).to(x.dtype).transpose(1, 2).contiguous()

    return rotate


def _modulate(normal: Normals) -> Callable[[torch.Tensor], torch.Tensor]:
    scale = normal(2, 1, 1536)
    return lambda x: F.layer_norm(x, (1536,)) * (1 + scale) + scale


VIDEO, TINY_VIDEO = (1, 96, 2, 544, 960), (1, 8, 2, 12, 20)

DYNAMIC_KERNELS = (
    Kernel("pad", lambda _: _pad, VIDEO, TINY_VIDEO, (3, 4)),
    Kernel(
        "pad to channels-last",
        lambda _: lambda x: _pad(x).contiguous(memory_format=torch.channels_last_3d),
        VIDEO,
        TINY_VIDEO,
        (3, 4),
    ),
    Kernel("pad of channels-last", lambda _: _pad, VIDEO, TINY_VIDEO, (3, 4), channels_last=True),
    Kernel("causal cat of channels-last", lambda _: _after_frames, VIDEO, TINY_VIDEO, (3, 4), channels_last=True),
    Kernel("channel norm of channels-last", lambda _: _channel_norm, VIDEO, TINY_VIDEO, (3, 4), channels_last=True),
    Kernel(
        "crop to channels-last",
        lambda _: lambda x: x[:, :, 1:, 1:].contiguous(memory_format=torch.channels_last) * 2,
        (2, 128, 544, 960),
        (2, 8, 12, 20),
        (2, 3),
    ),
    Kernel(
        "upsample",
        lambda _: lambda x: F.interpolate(x, scale_factor=2.0),
        (2, 128, 272, 480),
        (2, 8, 12, 20),
        (2, 3),
        channels_last=True,
    ),
    Kernel("patchify", lambda _: _patches, (2, 64, 544, 960), (2, 8, 12, 20), (2, 3)),
    Kernel("qkv split", lambda _: _split_heads, (2, 16384, 4608), (2, 64, 384), (1,)),
    Kernel("rope", _rope, (2, 16384, 24, 64), (2, 64, 2, 64), (1,)),
    Kernel("adaln", _modulate, (2, 16384, 1536), (2, 16, 1536), (1,)),
    Kernel("video blocks", lambda _: Convolved(96, 3), (1, 96, 4, 272, 480), (1, 96, 2, 8, 12), (3, 4)),
    Kernel("picture blocks", lambda _: Convolved(128, 2), (1, 128, 512, 512), (1, 128, 12, 16), (2, 3)),
)
