"""`group_norm_silu` on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tritium import compat
from tritium.ops.group_norm_silu.tiles import (
    launch_options_pixel_statistics,
    launch_options_pixels,
    launch_options_planes,
    launch_options_run,
    launch_options_whole,
    power_of_two_from,
)
from tritium.ops.memory_format import empty_as, is_channels_last
from tritium.ops.op import Arguments, present
from tritium.ops.triton_launch import dynamic_width, in_memory, launch, obstacle

# The largest group that fits in the registers of one program, which needs one launch instead of two or three.
WHOLE_GROUP = 8_192

# Programs for the statistics: two rounds of four on each of an H200's 132 multiprocessors. More programs would produce
# more partial results to combine.
STATISTICS_PROGRAMS = 1_056


def statistics_parts(tiles: int, programs: int) -> int:
    """Return how many programs share a row's tiles, for `programs` pairs of row and column block."""
    return max(1, min(tiles, STATISTICS_PROGRAMS // programs))


def shared_tiles(tiles: int, rows: int) -> tuple[int, int]:
    """Return how many programs share each row's tiles, and the most tiles per program.

    Dynamic sizes are replaced by those of the call that is compiled: the result is correct for any number of programs.
    """
    parts = statistics_parts(present(tiles), present(rows))
    parts = -(-present(tiles) // -(-present(tiles) // parts))
    return parts, -(-tiles // parts)


# Tiles that one program normalizes in channels-last tensors, so that it reads statistics and weights once for all.
PIXELS_STEPS = 4

# Partial results that a program combines at a time, in the kernel that also normalizes and in the one that only combines.
PARTIALS = 64
COMBINED = 1024


def results(given: Arguments) -> torch.Tensor:
    return empty_as(given.x, given.out_dtype or given.x.dtype)


def run_triton(given: Arguments) -> torch.Tensor:
    from tritium.ops.kernels.group_norm_silu import group_norm_silu_whole_kernel

    x, groups = given.x, given.groups
    out = results(given)
    if compat.traced.statically_known(out.numel() == 0):
        return out
    channels_last = is_channels_last(x)
    x = in_memory(x if channels_last else x.contiguous(), channels_last=channels_last)
    images, channels = x.shape[:2]
    pixels = x.numel() // (images * channels)
    run = channels // groups * pixels
    parts = (given.weight, given.bias, given.offset)
    of_channels = tuple(None if part is None else part.contiguous() for part in parts)
    how = {name: part is not None for name, part in zip(("HAS_WEIGHT", "HAS_BIAS", "HAS_OFFSET"), parts, strict=True)}
    eps = float(given.eps)
    # Groups of dynamic size may become too large for one program.
    if isinstance(run, int) and run <= WHOLE_GROUP:
        cut, options = launch_options_whole(run)
        sizes = (channels, pixels, groups)
        how["CHANNELS_LAST"] = channels_last
        grid = (images * groups,)
        launch(group_norm_silu_whole_kernel, grid, x, *of_channels, out, *sizes, EPS=eps, options=options, **how, **cut)
    elif channels_last:
        _run_pixels(x, of_channels, out, groups, eps, how)
    else:
        _run_planes(x, of_channels, out, groups, eps, how)
    return out


def _run_planes(
    x: torch.Tensor,
    of_channels: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    groups: int,
    eps: float,
    how: dict[str, Any],
) -> None:
    from tritium.ops.kernels.group_norm_silu import group_norm_silu_planes_kernel, group_norm_silu_statistics_kernel

    images, channels = x.shape[:2]
    pixels = x.numel() // (images * channels)
    # A group is contiguous in memory. With an offset each channel has separate statistics, stored next to each other.
    members = channels // groups if how["HAS_OFFSET"] else 1
    rows, run = images * groups * members, channels // groups * pixels // members
    cut, options = launch_options_run()
    width = cut["COLUMNS"]
    tiles = -(-run // (width * cut["ROWS"]))
    parts, steps = shared_tiles(tiles, rows)
    plane = rows * parts
    partials = _scratch(x, 3 * plane)
    # A part is a run of consecutive tiles.
    sizes = (run, width, parts, steps, steps, 1, 1, plane, channels)
    own = {"HAS_OFFSET": how["HAS_OFFSET"], "PLANES": True, "UNIT": width}
    launch(
        group_norm_silu_statistics_kernel,
        (plane,),
        x,
        of_channels[2],
        partials,
        *sizes,
        options=options,
        **own,
        **cut,
    )
    cut, options = launch_options_planes(present(pixels))
    programs = images * channels * -(-pixels // cut["BLOCK"])
    parts *= members
    shapes = (channels, pixels, channels // groups, parts, plane)
    cut["PARTIALS"] = min(PARTIALS, power_of_two_from(parts))
    launch(
        group_norm_silu_planes_kernel,
        (programs,),
        x,
        *of_channels,
        partials,
        out,
        *shapes,
        EPS=eps,
        options=options,
        **how,
        **cut,
    )


def _run_pixels(
    x: torch.Tensor,
    of_channels: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    groups: int,
    eps: float,
    how: dict[str, Any],
) -> None:
    from tritium.ops.kernels.group_norm_silu import (
        group_norm_silu_combine_kernel,
        group_norm_silu_pixels_kernel,
        group_norm_silu_statistics_kernel,
    )

    images, channels = x.shape[:2]
    length = x.numel() // images
    cut, options = launch_options_pixel_statistics(channels)
    blocks = -(-channels // cut["COLUMNS"])
    tiles = -(-length // (channels * cut["ROWS"]))
    parts = statistics_parts(present(tiles), present(images) * blocks)
    steps = -(-tiles // parts)
    # Channels of one group that a program reduces by halving: the largest power of two that divides their number.
    group_channels = channels // groups
    unit = min(group_channels & -group_channels, cut["COLUMNS"])
    units = channels // unit
    plane = images * parts * units
    partials = _scratch(x, 3 * plane)
    # Interleave the parts: all programs read neighbouring tiles, which advance from the start of the image to its end.
    sizes = (length, channels, parts, steps, 1, parts, units, plane, channels)
    grid = (images * parts * blocks,)
    own = {"HAS_OFFSET": how["HAS_OFFSET"], "PLANES": False, "UNIT": unit}
    launch(group_norm_silu_statistics_kernel, grid, x, of_channels[2], partials, *sizes, options=options, **own, **cut)
    moments = _scratch(x, 2 * images * groups)
    parts *= units // groups
    block = min(COMBINED, power_of_two_from(parts))
    grid = (images * groups,)
    launch(group_norm_silu_combine_kernel, grid, partials, moments, parts, plane, EPS=eps, BLOCK=block, options={})
    cut, options = launch_options_pixels(channels)
    parts = -(-length // (channels * cut["ROWS"] * PIXELS_STEPS))
    shapes = (length, channels, groups, parts)
    grid = (images * parts * blocks,)
    cut["STEPS"] = PIXELS_STEPS
    launch(group_norm_silu_pixels_kernel, grid, x, *of_channels, moments, out, *shapes, options=options, **how, **cut)


def _scratch(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """Allocate float32 memory for another launch; flat, so that dynamic sizes add no guards on strides."""
    return torch.empty((numbers,), dtype=torch.float32, device=x.device)


def decline_triton(given: Arguments) -> str | None:
    reason = dynamic_width(given.x.shape[1])
    return reason or obstacle(given.x, given.weight, given.bias, given.offset)
