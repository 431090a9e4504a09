"""Tile sizes and launch options of the kernels of `group_norm_silu`."""

from __future__ import annotations

# With at most 64 registers per thread 32 warps fit on a multiprocessor, which keeps enough loads in flight; without a limit
# the compiler takes up to 89.
STATISTICS_REGISTERS = 64


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
