"""`channel_norm` on a GPU, where the channels of a pixel lie together: a program normalises some pixels, and reads each once."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritium.ops import launch, rows
from tritium.ops.memory_format import FORMATS, empty_as, is_channels_last

# Numbers that a program of 4 warps has in registers: 32 for each thread.
HELD = 4_096


def launch_options(channels: int) -> dict[str, int]:
    """Pixels of a program, and tiles of a pixel. Three tiles of 32 have no idle lane for 96 channels, one of 128 has a quarter."""
    tile = channels & -channels
    pieces = channels // tile
    if tile < 32 or pieces > 4:
        tile, pieces = 1 << (channels - 1).bit_length(), 1
    held = tile * pieces
    pixels = max(1, 1 << (HELD // held).bit_length() - 1) if held <= HELD else 1
    return {"PIXELS": pixels, "TILE": tile, "PIECES": pieces, "num_warps": 4 if held <= HELD else 8}


@functools.cache
def _kernel() -> Any:
    import triton.language as tl

    @rows.jit
    def channel_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        offset_ptr,
        out_ptr,
        scale,
        shift,
        eps,
        count,
        CHANNELS: tl.constexpr,
        HAS_OFFSET: tl.constexpr,
        SILU: tl.constexpr,
        PIXELS: tl.constexpr,
        TILE: tl.constexpr,
        PIECES: tl.constexpr,
    ):
        # 64 bits: a batch of video passes 2^31 numbers.
        pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
        lanes = tl.arange(0, TILE)[None, :]
        squares = tl.zeros([PIXELS, TILE], dtype=tl.float32)
        held = ()
        for piece in tl.static_range(PIECES):
            columns = piece * TILE + lanes
            inside = (pixel < count) & (columns < CHANNELS)
            x = tl.load(x_ptr + pixel * CHANNELS + columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_OFFSET:
                x += tl.load(offset_ptr + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
            squares += x * x
            held += (x,)  # type: ignore[assignment]
        factor = scale / tl.maximum(tl.sqrt(tl.sum(squares, axis=1, keep_dims=True)), eps)
        for piece in tl.static_range(PIECES):
            columns = piece * TILE + lanes
            inside = (pixel < count) & (columns < CHANNELS)
            weight = tl.load(weight_ptr + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
            y = held[piece] * factor * weight + shift
            if SILU:
                y = y / (1.0 + tl.exp(-y))
            tl.store(out_ptr + pixel * CHANNELS + columns, y.to(out_ptr.dtype.element_ty), mask=inside)

    return channel_norm_kernel


def run_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    shift: float,
    dim: int,
    eps: float,
    silu: bool,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    del dim
    out = empty_as(x, out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    channels = x.shape[1]
    # Whoever compiled this may lay out its input anew: then there and back.
    together = x if is_channels_last(x) or channels == 1 else x.contiguous(memory_format=FORMATS[x.ndim])
    made = out if together is x else torch.empty_like(together, dtype=out.dtype)
    options = launch_options(channels)
    count = x.numel() // channels
    grid = (-(-count // options["PIXELS"]),)
    numbers = (float(scale), float(shift), float(eps), count)
    of_channels = (weight.contiguous(), weight if offset is None else offset.contiguous())
    given = {"CHANNELS": channels, "HAS_OFFSET": offset is not None, "SILU": silu}
    launch.start(_kernel(), grid, together, *of_channels, made, *numbers, **given, **options)
    return out if made is out else out.copy_(made)


def decline_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    shift: float,
    dim: int,
    eps: float,
    silu: bool,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> str | None:
    del scale, shift, eps, silu, out_dtype
    if dim % x.ndim != 1 or not is_channels_last(x):
        return "the kernel wants the channels of a pixel together in memory"
    return launch.cannot_launch(x, weight, offset)
