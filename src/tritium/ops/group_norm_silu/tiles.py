"""How much of a picture a program of `group_norm_silu` takes at a time on a GPU."""

from __future__ import annotations

# So that 32 warps fit a multiprocessor and keep it reading; left alone the compiler takes up to 89.
STATISTICS_REGISTERS = 64


def power_of_two_from(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# What a program takes, and Triton's options.
Options = tuple[dict[str, int], dict[str, int]]


def launch_options_whole(run: int) -> Options:
    """For groups of `run` numbers that one program keeps in registers."""
    block = power_of_two_from(run)
    return {"BLOCK": block}, {"num_warps": min(16, max(1, block // 512))}


def launch_options_run() -> Options:
    """For statistics of groups that lie in memory as one run: the numbers that a program reads at a time."""
    return {"ROWS": 1, "COLUMNS": 4096}, {"num_warps": 8, "maxnreg": STATISTICS_REGISTERS}


def launch_options_planes(pixels: int) -> Options:
    """For normalising channels of `pixels` numbers that lie together."""
    block = min((4096, 2048, 1024), key=lambda size: -(-pixels // size) * size)
    block = min(block, max(128, power_of_two_from(pixels)))
    return {"BLOCK": block}, {"num_warps": max(1, min(8, block // 512))}


def launch_options_pixels(channels: int) -> Options:
    """For tensors whose channels lie together: pixels and channels that a program takes at a time."""
    sizes = [size for size in (512, 256, 128, 64) if size < 2 * channels] or [power_of_two_from(channels)]
    lanes = {size: -(-channels // size) * size for size in sizes}
    # As wide as leaves an eighth of the lanes without a channel; where none does, what leaves the fewest.
    columns = next(
        (size for size in sizes if lanes[size] <= channels * 9 / 8), min(sizes, key=lambda size: lanes[size])
    )
    return {"ROWS": max(1, 4096 // columns), "COLUMNS": columns}, {"num_warps": 8}


def launch_options_pixel_statistics(channels: int) -> Options:
    """For statistics of such tensors: half as much at a time, so that twice as many programs read at once."""
    cut, _ = launch_options_pixels(channels)
    options = {"num_warps": 4, "maxnreg": STATISTICS_REGISTERS}
    return {**cut, "ROWS": max(1, 2048 // cut["COLUMNS"])}, options
