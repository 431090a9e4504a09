"""The trial that compares the providers of `channel_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Arguments, Draw, Shape, Trial, count, octave, present

EPS = 1e-12

# The frames that a video decoder computes at a time, and the earlier frames that a causal convolution sees.
FRAMES = 4
KEPT = 2


def shape(given: Arguments) -> Shape:
    channels = present(given.x.shape[given.dim])
    return {"pixels": octave(count(given.x.shape) // max(1, channels)), "channels": channels}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    channels = shape["channels"]
    return {
        "x": _video(shape, channels, FRAMES, draw),
        "weight": draw(channels, 1, 1, 1),
        "scale": channels**0.5,
        "shift": 0.0,
        "dim": 1,
        "eps": EPS,
        "silu": True,
        "out_dtype": None,
    }


def _video(shape: Any, channels: int, frames: int, draw: Draw) -> torch.Tensor:
    of_frame = max(1, shape["pixels"] // FRAMES)
    height = 1 << (of_frame.bit_length() - 1) // 2
    return draw(1, channels, frames, height, of_frame // height).to(memory_format=torch.channels_last_3d)


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return the op between two causal 1x1x1 convolutions, from and to a few channels."""
    channels, few = shape["channels"], 8
    inner, outer = (
        (draw(*size, 1, 1, 1) / size[1] ** 0.5).to(memory_format=torch.channels_last_3d)
        for size in ((channels, few), (few, channels))
    )

    def between(*inputs: torch.Tensor) -> torch.Tensor:
        x, kept, inner, bias, weight, outer = inputs
        x = F.conv3d(x, inner, bias)
        x = F.silu(F.normalize(x, dim=1) * channels**0.5 * weight + 0.0)
        return F.conv3d(F.pad(torch.cat([kept, x], dim=2), (1, 1, 1, 1, 0, 0)), outer)

    inputs = (_video(shape, few, FRAMES, draw), _video(shape, channels, KEPT, draw))
    return between, (*inputs, inner, draw(channels), draw(channels, 1, 1, 1), outer)


TRIAL = Trial(
    shape,
    alone,
    block,
    # Four frames of 544 x 960 in the decoders of Wan 2.1 and Qwen-Image, from the last layer to the first, and of Wan 2.2.
    standard=tuple(
        {"pixels": pixels, "channels": channels}
        for pixels, channels in ((1 << 21, 96), (1 << 21, 192), (1 << 19, 192), (1 << 17, 384), (1 << 19, 256))
    ),
)
