"""The trial that compares the providers of `group_norm_silu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.memory_format import is_channels_last
from tritium.ops.op import Arguments, Draw, Shape, Trial, count, octave, present


def shape(given: Arguments) -> Shape:
    x = given.x
    pixels = octave(present(x.shape[0]) * count(x.shape[2:]))
    layout = "channels_last" if is_channels_last(x) else "contiguous"
    return {"pixels": pixels, "channels": present(x.shape[1]), "groups": given.groups, "layout": layout}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    return {
        "x": _image(shape, shape["channels"], draw),
        "groups": shape["groups"],
        "weight": draw(shape["channels"]),
        "bias": draw(shape["channels"]),
        "eps": 1e-6,
        "out_dtype": None,
    }


def _image(shape: Any, channels: int, draw: Draw) -> torch.Tensor:
    height = 1 << (shape["pixels"].bit_length() - 1) // 2
    image = draw(1, channels, height, shape["pixels"] // height)
    return image.to(memory_format=torch.channels_last) if shape["layout"] == "channels_last" else image


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return the op between two 1x1 convolutions, from and to a few channels."""
    given, few = alone(shape, draw), 8
    channels, groups = shape["channels"], shape["groups"]
    inner, outer = draw(channels, few, 1, 1) / few**0.5, draw(few, channels, 1, 1) / channels**0.5
    if shape["layout"] == "channels_last":
        inner, outer = (weight.to(memory_format=torch.channels_last) for weight in (inner, outer))

    def between(*inputs: torch.Tensor) -> torch.Tensor:
        x, inner, offset, weight, bias, outer = inputs
        x = F.conv2d(x, inner, offset)
        return F.conv2d(F.silu(F.group_norm(x, groups, weight, bias, 1e-6)), outer)

    return between, (_image(shape, few, draw), inner, draw(channels), given["weight"], given["bias"], outer)


TRIAL = Trial(
    shape,
    alone,
    block,
    # The decoder of FLUX's VAE at 1024 pixels, from the last layer to the first, and SDXL's UNet.
    standard=tuple(
        {"pixels": pixels, "channels": channels, "groups": 32, "layout": layout}
        for layout in ("contiguous", "channels_last")
        for pixels, channels in ((1 << 20, 128), (1 << 18, 256), (1 << 16, 512), (1 << 14, 320))
    ),
)
