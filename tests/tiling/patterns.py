"""Memory-bound patterns of diffusion models, each with small inputs and the dims that are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

R = torch.randn


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def channels_last_3d(x):
    return x.contiguous(memory_format=torch.channels_last_3d)


@dataclass(frozen=True)
class Pattern:
    function: Callable[..., Any]
    inputs: Callable[[], Sequence[torch.Tensor]]
    dynamic: Mapping[int, Sequence[int]]


def rope(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-b, a], -1).flatten(3)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype).transpose(1, 2).contiguous()


def patchify(x):
    batch, channels, height, width = x.shape
    return x.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 64) * 1.5


def unpatchify(x, size):
    height, width = size.shape
    return x.view(2, height, width, 2, 2, 16).permute(0, 5, 1, 3, 2, 4).reshape(2, 16, height * 2, width * 2) * 1.5


def upsample(x):
    return F.interpolate(x.permute(0, 2, 1, 3, 4).reshape(-1, 96, *x.shape[3:]), scale_factor=2.0, mode="nearest")


def windows(x):
    return x.view(2, x.shape[1] // 8, 8, x.shape[2] // 8, 8, 128).permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, 128) + 1


def wan_norm(x, gain):
    return F.silu(F.normalize(x, dim=1) * (96**0.5) * gain)


def image():
    return R(2, 64, 32, 48)


def video():
    return R(1, 96, 5, 32, 48)


# Two dynamic dims that are padded or cropped: what Inductor alone leaves with one flat grid.
CUT = {
    "pad_to_nhwc": Pattern(lambda x: channels_last(F.pad(x, (1, 1, 1, 1))) * 2, lambda: (image(),), {0: (2, 3)}),
    "crop_to_nhwc": Pattern(lambda x: channels_last(x[:, :, 1:, 1:]) * 2, lambda: (image(),), {0: (2, 3)}),
    "pad_to_ndhwc": Pattern(lambda x: channels_last_3d(F.pad(x, (1, 1, 1, 1, 2, 0))), lambda: (video(),), {0: (3, 4)}),
    "causal_pad_cat": Pattern(
        lambda x, c: channels_last_3d(F.pad(torch.cat([c, x], 2), (1, 1, 1, 1))),
        lambda: (R(1, 96, 4, 32, 48), R(1, 96, 2, 32, 48)),
        {0: (3, 4), 1: (3, 4)},
    ),
    "downsample_pad": Pattern(lambda x: channels_last(F.pad(F.silu(x), (0, 1, 0, 1))), lambda: (image(),), {0: (2, 3)}),
}

PLAIN = {
    "nchw_to_nhwc": Pattern(lambda x: x.permute(0, 2, 3, 1).contiguous() * 2, lambda: (image(),), {0: (2, 3)}),
    "pad_nchw": Pattern(lambda x: F.pad(x, (1, 1, 1, 1)) * 2, lambda: (image(),), {0: (2, 3)}),
    "pad_nhwc": Pattern(lambda x: F.pad(x, (1, 1, 1, 1)) * 2, lambda: (channels_last(image()),), {0: (2, 3)}),
    "pad_ncdhw": Pattern(lambda x: F.pad(x, (1, 1, 1, 1, 2, 0)), lambda: (video(),), {0: (3, 4)}),
    "pad_group_norm": Pattern(
        lambda x, w, b: F.group_norm(F.pad(x, (0, 1, 0, 1)), 32, w, b) * 2,
        lambda: (image(), R(64), R(64)),
        {0: (2, 3)},
    ),
    "group_norm_nchw": Pattern(
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), lambda: (image(), R(64), R(64)), {0: (2, 3)}
    ),
    "group_norm_nhwc": Pattern(
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        lambda: (channels_last(image()), R(64), R(64)),
        {0: (2, 3)},
    ),
    "group_norm_to_nhwc": Pattern(
        lambda x, w, b: channels_last(F.silu(F.group_norm(x, 32, w, b))),
        lambda: (image(), R(64), R(64)),
        {0: (2, 3)},
    ),
    "wan_norm_ncdhw": Pattern(wan_norm, lambda: (video(), R(96, 1, 1, 1)), {0: (3, 4)}),
    "wan_norm_ndhwc": Pattern(wan_norm, lambda: (channels_last_3d(video()), R(96, 1, 1, 1)), {0: (3, 4)}),
    "wan_norm_to_ndhwc": Pattern(
        lambda x, g: channels_last_3d(wan_norm(x, g)), lambda: (video(), R(96, 1, 1, 1)), {0: (3, 4)}
    ),
    "upsample": Pattern(upsample, lambda: (video(),), {0: (3, 4)}),
    "unpatchify": Pattern(unpatchify, lambda: (R(2, 32 * 48, 64), torch.empty(32, 48)), {0: (1,), 1: (0, 1)}),
    "patchify": Pattern(patchify, lambda: (R(2, 16, 64, 96),), {0: (2, 3)}),
    "transposed_add": Pattern(
        lambda x, y: x + y.transpose(1, 2), lambda: (R(2, 512, 1024), R(2, 1024, 512)), {0: (2,), 1: (1,)}
    ),
    "windows": Pattern(windows, lambda: (R(2, 64, 96, 128),), {0: (1, 2)}),
    "softmax_dim1": Pattern(lambda x: torch.softmax(x, 1), lambda: (R(2, 64, 1024),), {0: (2,)}),
}

# Transformer kernels, which no tiling policy may change: more dims were measured 1.3 to 3.2 times slower.
TRANSFORMER = {
    "qkv_split": Pattern(
        lambda x: x.view(2, x.shape[1], 3, 8, 64).permute(2, 0, 3, 1, 4).contiguous(),
        lambda: (R(2, 1024, 3 * 8 * 64),),
        {0: (1,)},
    ),
    "rope": Pattern(
        rope, lambda: (R(2, 1024, 8, 64), R(1, 1024, 1, 64), R(1, 1024, 1, 64)), {0: (1,), 1: (1,), 2: (1,)}
    ),
    "ada_norm": Pattern(
        lambda x, scale, shift, gate, y: (
            F.layer_norm(x + gate[:, None] * y, (512,)) * (1 + scale[:, None]) + shift[:, None]
        ),
        lambda: (R(2, 1024, 512), R(2, 512), R(2, 512), R(2, 512), R(2, 1024, 512)),
        {0: (1,), 4: (1,)},
    ),
}

ALL = {**CUT, **PLAIN, **TRANSFORMER}
