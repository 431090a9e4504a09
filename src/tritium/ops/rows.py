"""How kernels over rows cut a row into pieces, and reach it through strides.

A program holds whole rows in registers as a tuple of tiles of one size: every tile is one 16-byte access a thread in
bfloat16, and only the last one has idle lanes. One tile of the next power of two would idle 25 % of them for a width
of 3072 and 37 % for 5120.
"""

from __future__ import annotations

import torch

# A row this wide still fits the registers of one program of 8 warps; wider rows are read in a loop.
WHOLE_ROW = 16_384

# Elements one warp takes in one 16-byte access a thread, in bfloat16.
WARP_TILE = 32 * 8


def launch_options(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return how rows of a width are cut, and Triton's options. PIECES is 0 for rows that one program cannot hold.

    Few warps a row and up to 5 tiles a warp: by the registers that sm_90 code takes, 4 to 9 programs fit on an H200's
    multiprocessor with 80 KiB or more of loads in flight, where about 25 KiB hide the memory's latency; and few warps
    wait at a reduction's barrier.
    """
    if width > WHOLE_ROW:
        return {"ROWS": 1, "TILE": 16 * WARP_TILE, "PIECES": 0}, {"num_warps": 16}
    warps = next((warps for warps in (1, 2, 4) if width <= 5 * warps * WARP_TILE), 8)
    tile = warps * WARP_TILE
    while tile // 2 >= max(width, 16):
        tile //= 2
    # Narrow rows share a program, so that none has less than 4 warps of work.
    cut = {"ROWS": max(1, 4 * WARP_TILE // tile), "TILE": tile, "PIECES": -(-width // tile)}
    return cut, {"num_warps": max(4, warps)}


def as_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`tensor`, broadcast to a shape of rank 1 or more that is not empty, as [B, S, H]: a view wherever one exists."""
    return tensor.expand(shape).reshape(shape[0] if len(shape) > 2 else 1, -1, shape[-1])


def as_dense_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`as_rows` with neighbouring columns next to each other in memory; batches and tokens may lie anywhere."""
    rows = as_rows(tensor, shape)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
