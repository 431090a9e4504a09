"""`channel_norm` on a GPU for channels-last tensors: every program reads its pixels once."""

from __future__ import annotations

import torch

from tritium import compat
from tritium.ops.memory_format import FORMATS, empty_as, is_channels_last
from tritium.ops.op import Arguments
from tritium.ops.triton_launch import dynamic_width, launch, obstacle

# Values that a program of 4 warps holds in registers: 32 per thread.
HELD = 4_096


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
    count = x.numel() // channels
    launch(
        channel_norm_kernel,
        (-(-count // cut["PIXELS"]),),
        together,
        weight.contiguous(),
        None if offset is None else offset.contiguous(),
        made,
        count,
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
    return dynamic_width(x.shape[1]) or obstacle(x, given.weight, given.offset)
