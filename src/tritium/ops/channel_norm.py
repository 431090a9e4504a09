"""`normalize(x + offset, dim) * scale * weight + shift`, optionally with SiLU, as in video VAEs.

It is computed over channels, in float32, and rounded once. The offset is one value per channel: the bias of the
preceding convolution, which this op adds. The result is channels-last if `x` is channels-last, else contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.ops.memory_format import FORMATS, channels_last, empty_as, is_channels_last, laid_as, with_offset
from tritium.ops.op import Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave, present
from tritium.ops.triton_launch import contiguous, decline_tensors, dynamic_width, launch

# Values that a program of 4 warps holds in registers: 32 per thread.
HELD = 4_096


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    shift: float,
    dim: int,
    eps: float,
    silu: bool,
    out_dtype: torch.dtype | None = None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.normalize(with_offset(x.to(wide), offset, dim), dim=dim, eps=eps) * scale * weight.to(wide) + shift
    return laid_as(x, (F.silu(normed) if silu else normed).to(out_dtype or x.dtype))


def arguments(draw: Draw, x: torch.Tensor, *, silu: bool = True, shift: float = 0.0) -> dict[str, Any]:
    channels = x.shape[1]
    numbers = {"scale": channels**0.5, "shift": shift, "dim": 1, "eps": 1e-12}
    return {"x": x, "weight": draw(channels, *[1] * (x.dim() - 2)), **numbers, "silu": silu}


def draw_samples(draw: Draw) -> Samples:
    plain = {"silu": False}
    for label, x, options in (
        ("video", draw(1, 96, 3, 5, 7), plain),
        ("image", draw(2, 63, 7, 100), {}),
        ("one channel", draw(1, 1, 5, 5), plain),
        ("many channels", draw(1, 3072, 2), plain),
        ("more channels", draw(1, 5120, 2), {}),
        ("channels last", channels_last(draw(2, 64, 8, 8)), {"shift": 0.5, "silu": False}),
        ("video, channels last", channels_last(draw(1, 96, 3, 5, 7)), {}),
        ("odd sizes, channels last", channels_last(draw(1, 63, 7, 9)), {}),
        ("one channel, channels last", channels_last(draw(2, 1, 5, 5)), {}),
        ("many channels, channels last", channels_last(draw(1, 3072, 2, 3)), {}),
        ("more channels, channels last", channels_last(draw(1, 5120, 2, 2)), plain),
        ("three tiles, channels last", channels_last(draw(1, 384, 3, 5, 7)), {}),
        ("some channels of more, channels last", channels_last(draw(2, 64, 5, 5))[:, :60], {}),
        # Pixels that are zero in all channels stay zero.
        ("zeros, channels last", channels_last(draw(1, 96, 4, 4)) * 0, {}),
        ("no frames", draw(1, 96, 0, 5, 7), plain),
    ):
        yield label, arguments(draw, x, **options)
    for label, x in (
        ("an offset", draw(2, 63, 5, 7)),
        ("an offset, channels last", channels_last(draw(2, 63, 5, 7))),
        ("an offset, three tiles, channels last", channels_last(draw(1, 96, 3, 5, 7))),
    ):
        yield label, {**arguments(draw, x), "out_dtype": None, "offset": draw(x.shape[1])}


def launch_options(channels: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the pixels per program and the tiles per pixel, and Triton's options.

    For 96 channels three tiles of 32 have no idle lanes; in one tile of 128 a quarter of the lanes would be idle.
    """
    tile = channels & -channels
    pieces = channels // tile
    if tile < 32 or pieces > 4:
        tile, pieces = 1 << (channels - 1).bit_length(), 1
    held = tile * pieces
    pixels = max(1, 1 << (HELD // held).bit_length() - 1) if held <= HELD else 1
    return {"PIXELS": pixels, "TILE": tile, "PIECES": pieces}, {"num_warps": 4 if held <= HELD else 8}


def results(given: Arguments) -> torch.Tensor:
    return empty_as(given.x, given.out_dtype or given.x.dtype)


def run_triton(given: Arguments) -> torch.Tensor:
    """Launch the kernel for channels-last tensors: every program reads its pixels once."""
    from tritium.ops.kernels.channel_norm import channel_norm_kernel

    x, weight, offset = given.x, given.weight, given.offset
    out = results(given)
    if compat.traced.statically_known(out.numel() == 0):
        return out
    channels = x.shape[1]
    # Inductor may have changed the input's layout: convert to channels-last and back.
    together = x if is_channels_last(x) or channels == 1 else x.contiguous(memory_format=FORMATS[x.ndim])
    made = out if together is x else empty_as(together, out.dtype)
    cut, options = launch_options(channels)
    pixels = x.numel() // channels
    launch(
        channel_norm_kernel,
        (-(-pixels // cut["PIXELS"]),),
        together,
        weight.contiguous(),
        contiguous(offset),
        made,
        pixels,
        SCALE=float(given.scale),
        SHIFT=float(given.shift),
        EPS=float(given.eps),
        CHANNELS=channels,
        HAS_OFFSET=offset is not None,
        SILU=given.silu,
        options=options,
        **cut,
    )
    return out if made is out else out.copy_(made)


def decline_triton(given: Arguments) -> str | None:
    x = given.x
    if given.dim % x.ndim != 1 or not is_channels_last(x):
        return "the kernel wants the channels of a pixel together in memory"
    return dynamic_width(x.shape[1]) or decline_tensors(x, given.weight, given.offset)


# The frames that a video decoder computes at a time, and the earlier frames that a causal convolution sees.
FRAMES = 4
KEPT = 2


def shape(given: Arguments) -> Shape:
    channels = present(given.x.shape[given.dim])
    return {"pixels": octave(count(given.x.shape) // max(1, channels)), "channels": channels}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    return arguments(draw, _video(shape, shape["channels"], FRAMES, draw))


def _video(shape: Any, channels: int, frames: int, draw: Draw) -> torch.Tensor:
    of_frame = max(1, shape["pixels"] // FRAMES)
    height = 1 << (of_frame.bit_length() - 1) // 2
    return channels_last(draw(1, channels, frames, height, of_frame // height))


def block(shape: Any, draw: Draw) -> Block:
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


# Four frames of 544 x 960 in the decoders of Wan 2.1 and Qwen-Image, from the last layer to the first, and of Wan 2.2.
STANDARD = ((1 << 21, 96), (1 << 21, 192), (1 << 19, 192), (1 << 17, 384), (1 << 19, 256))
TRIAL = Trial.in_block(shape, alone, block, "pixels channels", STANDARD)

PROVIDER = Provider("triton", "channel_norm", run_triton, decline_triton, traced=True)
OP = Op("channel_norm", reference, draw_samples, (PROVIDER,), results=results, trial=TRIAL, keeps_strides=True)
