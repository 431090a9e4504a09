"""`silu(group_norm(x + offset))`, which precedes every convolution of a UNet or VAE, in float32 and rounded once.

The offset is one value per channel: the bias of the preceding convolution, which this op adds. The result is
channels-last if `x` is channels-last, else contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.ops.memory_format import channels_last, empty_as, is_channels_last, laid_as, with_offset
from tritium.ops.op import Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave, present
from tritium.ops.triton_launch import contiguous, decline_tensors, dynamic_width, in_memory, launch

# The largest group that fits in the registers of one program, which needs one launch instead of two or three.
WHOLE_GROUP = 8_192

# Programs for the statistics: two rounds of four on each of an H200's 132 multiprocessors. More programs would produce
# more partial results to combine.
STATISTICS_PROGRAMS = 1_056

# With at most 64 registers per thread 32 warps fit on a multiprocessor, which keeps enough loads in flight; without a limit
# the compiler takes up to 89.
STATISTICS_REGISTERS = 64

# Tiles that one program normalizes in channels-last tensors, so that it reads statistics and weights once for all.
PIXELS_STEPS = 4

# Partial results that a program combines at a time, in the kernel that also normalizes and in the one that only combines.
PARTIALS = 64
COMBINED = 1024


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    own = {name: part.to(wide) for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    out = F.silu(F.group_norm(with_offset(x.to(wide), offset), groups, eps=eps, **own)).to(out_dtype or x.dtype)
    return laid_as(x, out)


def arguments(draw: Draw, x: torch.Tensor, groups: int, *, affine: bool = True) -> dict[str, Any]:
    weight, bias = (draw(x.shape[1]) if affine else None for _ in range(2))
    return {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": 1e-6}


def draw_samples(draw: Draw) -> Samples:
    for label, x, groups in (
        ("image", draw(2, 64, 7, 9), 32),
        ("one pixel", draw(1, 32, 1, 1), 8),
        ("one pixel, channels last", channels_last(draw(2, 32, 1, 1)), 8),
        ("no pixels, only channels", draw(3, 60), 6),
        ("odd sizes", draw(1, 63, 5, 100), 7),
        ("odd sizes, channels last", channels_last(draw(1, 63, 5, 100)), 7),
        ("many channels", draw(1, 3072, 3), 32),
        ("more channels", draw(1, 5120, 2), 32),
        ("channels last", channels_last(draw(2, 64, 8, 8)), 32),
        ("a group a channel", draw(2, 7, 6, 6), 7),
        ("one group", channels_last(draw(2, 7, 6, 6)), 1),
        # Farther from zero no norm in float32 is exact, including the reference.
        ("far from zero", draw(1, 32, 9, 16) + 30, 8),
        ("every second column", draw(2, 60, 4, 14)[..., ::2], 6),
        ("some channels of more, channels last", channels_last(draw(2, 64, 5, 5))[:, :60], 6),
        ("groups over several programs", draw(2, 6, 61, 50), 2),
        ("groups over several programs, channels last", channels_last(draw(2, 60, 37, 23)), 6),
        ("no images", draw(0, 64, 4, 4), 32),
    ):
        yield label, arguments(draw, x, groups)
    yield "video", arguments(draw, draw(1, 60, 3, 5, 7), 4, affine=False)
    yield "video, channels last", arguments(draw, channels_last(draw(2, 60, 3, 5, 7)), 4, affine=False)
    for label, x, groups in (
        ("an offset", draw(2, 60, 5, 7), 6),
        ("an offset, channels last", channels_last(draw(2, 63, 5, 7)), 7),
        ("an offset, several programs", draw(1, 6, 61, 50), 2),
        ("an offset, several programs, channels last", channels_last(draw(2, 60, 37, 23)), 6),
    ):
        given = arguments(draw, x, groups, affine=x.shape[1] != 63)
        yield label, {**given, "out_dtype": None, "offset": draw(x.shape[1])}


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


def power_of_two_from(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# Tile sizes, and Triton's options.
Options = tuple[dict[str, int], dict[str, int]]


def launch_options_whole(run: int) -> Options:
    """Return options for groups of `run` values that one program holds in registers."""
    block = power_of_two_from(run)
    return {"BLOCK": block}, {"num_warps": min(16, max(1, block // 512))}


def launch_options_run() -> Options:
    """Return options for the statistics of groups that are contiguous in memory."""
    return {"ROWS": 1, "COLUMNS": 4096}, {"num_warps": 8, "maxnreg": STATISTICS_REGISTERS}


def launch_options_planes(pixels: int) -> Options:
    """Return options for normalizing channels of `pixels` contiguous values."""
    block = min((4096, 2048, 1024), key=lambda size: -(-pixels // size) * size)
    block = min(block, max(128, power_of_two_from(pixels)))
    return {"BLOCK": block}, {"num_warps": max(1, min(8, block // 512))}


def launch_options_pixels(channels: int) -> Options:
    """Return options for channels-last tensors: the pixels and channels of a tile."""
    sizes = [size for size in (512, 256, 128, 64) if size < 2 * channels] or [power_of_two_from(channels)]
    lanes = {size: -(-channels // size) * size for size in sizes}
    # The widest tile with at most an eighth of the lanes idle; if there is none, the one with the fewest idle lanes.
    columns = next(
        (size for size in sizes if lanes[size] <= channels * 9 / 8), min(sizes, key=lambda size: lanes[size])
    )
    return {"ROWS": max(1, 4096 // columns), "COLUMNS": columns}, {"num_warps": 8}


def launch_options_pixel_statistics(channels: int) -> Options:
    """Return options for the statistics of channels-last tensors: smaller tiles for more programs."""
    cut, _ = launch_options_pixels(channels)
    options = {"num_warps": 4, "maxnreg": STATISTICS_REGISTERS}
    return {**cut, "ROWS": max(1, 2048 // cut["COLUMNS"])}, options


def results(given: Arguments) -> torch.Tensor:
    return empty_as(given.x, given.out_dtype or given.x.dtype)


def run_triton(given: Arguments) -> torch.Tensor:
    from tritium.ops.kernels.group_norm_silu import group_norm_silu_whole_kernel

    x, groups = given.x, given.groups
    out = results(given)
    if compat.traced.statically_known(out.numel() == 0):
        return out
    last = is_channels_last(x)
    x = in_memory(x if last else x.contiguous(), channels_last=last)
    images, channels = x.shape[:2]
    pixels = x.numel() // (images * channels)
    run = channels // groups * pixels
    of_channels = (contiguous(given.weight), contiguous(given.bias), contiguous(given.offset))
    eps = float(given.eps)
    # Groups of dynamic size may become too large for one program.
    if isinstance(run, int) and run <= WHOLE_GROUP:
        cut, options = launch_options_whole(run)
        how = {**_has(of_channels), "CHANNELS_LAST": last, "EPS": eps}
        sizes = (channels, pixels, groups)
        grid = (images * groups,)
        launch(group_norm_silu_whole_kernel, grid, x, *of_channels, out, *sizes, options=options, **how, **cut)
    elif last:
        _run_pixels(x, of_channels, out, groups, eps)
    else:
        _run_planes(x, of_channels, out, groups, eps)
    return out


# Weight, bias and offset.
OfChannels = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _has(of_channels: OfChannels) -> dict[str, Any]:
    names = ("HAS_WEIGHT", "HAS_BIAS", "HAS_OFFSET")
    return {name: part is not None for name, part in zip(names, of_channels, strict=True)}


def _run_planes(x: torch.Tensor, of_channels: OfChannels, out: torch.Tensor, groups: int, eps: float) -> None:
    from tritium.ops.kernels.group_norm_silu import group_norm_silu_planes_kernel, group_norm_silu_statistics_kernel

    images, channels = x.shape[:2]
    pixels = x.numel() // (images * channels)
    # A group is contiguous in memory. With an offset each channel has separate statistics, stored next to each other.
    members = channels // groups if of_channels[2] is not None else 1
    rows, run = images * groups * members, channels // groups * pixels // members
    cut, options = launch_options_run()
    width = cut["COLUMNS"]
    tiles = -(-run // (width * cut["ROWS"]))
    parts, steps = shared_tiles(tiles, rows)
    plane = rows * parts
    partials = _scratch(x, 3 * plane)
    # A part is a run of consecutive tiles.
    sizes = (run, width, parts, steps, steps, 1, 1, plane, channels)
    cut |= {"HAS_OFFSET": of_channels[2] is not None, "PLANES": True, "UNIT": width}
    launch(group_norm_silu_statistics_kernel, (plane,), x, of_channels[2], partials, *sizes, options=options, **cut)
    cut, options = launch_options_planes(present(pixels))
    grid = (images * channels * -(-pixels // cut["BLOCK"]),)
    parts *= members
    shapes = (channels, pixels, channels // groups, parts, plane)
    how = {**_has(of_channels), "PARTIALS": min(PARTIALS, power_of_two_from(parts)), "EPS": eps}
    launch(group_norm_silu_planes_kernel, grid, x, *of_channels, partials, out, *shapes, options=options, **how, **cut)


def _run_pixels(x: torch.Tensor, of_channels: OfChannels, out: torch.Tensor, groups: int, eps: float) -> None:
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
    cut |= {"HAS_OFFSET": of_channels[2] is not None, "PLANES": False, "UNIT": unit}
    launch(group_norm_silu_statistics_kernel, grid, x, of_channels[2], partials, *sizes, options=options, **cut)
    moments = _scratch(x, 2 * images * groups)
    parts *= units // groups
    block = min(COMBINED, power_of_two_from(parts))
    grid = (images * groups,)
    launch(group_norm_silu_combine_kernel, grid, partials, moments, parts, plane, EPS=eps, BLOCK=block, options={})
    cut, options = launch_options_pixels(channels)
    parts = -(-length // (channels * cut["ROWS"] * PIXELS_STEPS))
    shapes = (length, channels, groups, parts)
    grid = (images * parts * blocks,)
    how = {**_has(of_channels), "STEPS": PIXELS_STEPS}
    launch(group_norm_silu_pixels_kernel, grid, x, *of_channels, moments, out, *shapes, options=options, **how, **cut)


def _scratch(x: torch.Tensor, numbers: int) -> torch.Tensor:
    """Allocate float32 memory for another launch; flat, so that dynamic sizes add no guards on strides."""
    return torch.empty((numbers,), dtype=torch.float32, device=x.device)


def decline_triton(given: Arguments) -> str | None:
    return dynamic_width(given.x.shape[1]) or decline_tensors(given.x, given.weight, given.bias, given.offset)


def shape(given: Arguments) -> Shape:
    x = given.x
    pixels = octave(present(x.shape[0]) * count(x.shape[2:]))
    layout = "channels_last" if is_channels_last(x) else "contiguous"
    return {"pixels": pixels, "channels": present(x.shape[1]), "groups": given.groups, "layout": layout}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    return arguments(draw, _image(shape, shape["channels"], draw), shape["groups"])


def _image(shape: Any, channels: int, draw: Draw) -> torch.Tensor:
    height = 1 << (shape["pixels"].bit_length() - 1) // 2
    image = draw(1, channels, height, shape["pixels"] // height)
    return image.to(memory_format=torch.channels_last) if shape["layout"] == "channels_last" else image


def block(shape: Any, draw: Draw) -> Block:
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


# The decoder of FLUX's VAE at 1024 pixels, from the last layer to the first, and SDXL's UNet.
STANDARD = [
    (pixels, channels, 32, layout)
    for layout in ("contiguous", "channels_last")
    for pixels, channels in ((1 << 20, 128), (1 << 18, 256), (1 << 16, 512), (1 << 14, 320))
]
TRIAL = Trial.in_block(shape, alone, block, "pixels channels groups layout", STANDARD)

PROVIDER = Provider("triton", "group_norm_silu", run_triton, decline_triton, traced=True)
OP = Op("group_norm_silu", reference, draw_samples, (PROVIDER,), results=results, trial=TRIAL, keeps_strides=True)
