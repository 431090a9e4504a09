"""Divide rows into tiles for kernels over rows, and view tensors as rows.

A program holds whole rows in registers as a tuple of tiles of one size. A tile is one 16-byte access per thread in
bfloat16, and only the last tile has idle lanes. With a single tile of the next power of two, 25 % of the lanes would be
idle for a width of 3072, and 37 % for 5120.
"""

from __future__ import annotations

import torch

# The widest row that fits in the registers of one program of 8 warps; wider rows are read in a loop.
WHOLE_ROW = 16_384

# Elements that one warp loads with one 16-byte access per thread, in bfloat16.
WARP_TILE = 32 * 8


def launch_options(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiling of rows of a width, and Triton's options.

    PIECES is 0 for rows that one program cannot hold.

    A row gets few warps with up to 5 tiles each. By the register count of sm_90 code, 4 to 9 programs then fit on a
    multiprocessor of an H200, with at least 80 KiB of loads in flight; about 25 KiB hide the memory latency. With few warps
    the barrier of a reduction is short.
    """
    if width > WHOLE_ROW:
        return {"ROWS": 1, "TILE": 16 * WARP_TILE, "PIECES": 0}, {"num_warps": 16}
    warps = next((warps for warps in (1, 2, 4) if width <= 5 * warps * WARP_TILE), 8)
    tile = warps * WARP_TILE
    while tile // 2 >= max(width, 16):
        tile //= 2
    # Narrow rows share a program, so that every program has work for at least 4 warps.
    cut = {"ROWS": max(1, 4 * WARP_TILE // tile), "TILE": tile, "PIECES": -(-width // tile)}
    return cut, {"num_warps": max(4, warps)}


def as_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `tensor`, broadcast to a non-empty shape of rank 1 or more, as [B, S, H]: a view if possible."""
    return tensor.expand(shape).reshape(shape[0] if len(shape) > 2 else 1, -1, shape[-1])


def as_dense_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `as_rows(tensor, shape)` with contiguous columns, copied if necessary."""
    rows = as_rows(tensor, shape)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
