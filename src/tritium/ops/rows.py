"""What kernels over rows share: how a row is cut into pieces, reached through strides, loaded and stored.

A program holds whole rows in registers as a tuple of tiles of one size: every tile is one 16-byte access a thread in
bfloat16, and only the last one has idle lanes. One tile of the next power of two would idle 25 % of them for a width
of 3072 and 37 % for 5120.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tritium.errors import CatalogError

# A row this wide still fits the registers of one program of 8 warps; wider rows are read in a loop.
WHOLE_ROW = 16_384

# Elements one warp takes in one 16-byte access a thread, in bfloat16.
WARP_TILE = 32 * 8


def launch_options(width: int) -> dict[str, int]:
    """How rows of a width are cut, all that a sweep would vary. PIECES is 0 for rows that one program cannot hold.

    Few warps a row and up to 5 tiles a warp: by the registers that sm_90 code takes, 4 to 9 programs fit on an H200's
    multiprocessor with 80 KiB or more of loads in flight, where about 25 KiB hide the memory's latency; and few warps
    wait at a reduction's barrier.
    """
    if width > WHOLE_ROW:
        return {"ROWS": 1, "TILE": 16 * WARP_TILE, "PIECES": 0, "num_warps": 16}
    warps = next((warps for warps in (1, 2, 4) if width <= 5 * warps * WARP_TILE), 8)
    tile = warps * WARP_TILE
    while tile // 2 >= max(width, 16):
        tile //= 2
    # Narrow rows share a program, so that none has less than 4 warps of work.
    return {
        "ROWS": max(1, 4 * WARP_TILE // tile),
        "TILE": tile,
        "PIECES": -(-width // tile),
        "num_warps": max(4, warps),
    }


def as_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`tensor`, broadcast to a shape of rank 1 or more that is not empty, as [B, S, H]: a view wherever one exists."""
    return tensor.expand(shape).reshape(shape[0] if len(shape) > 2 else 1, -1, shape[-1])


def as_dense_rows(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`as_rows` with neighbouring columns next to each other in memory; batches and tokens may lie anywhere."""
    rows = as_rows(tensor, shape)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for kernels and for the functions that they call from their closures.

    Triton's interpreter runs the source again in the module's globals and finds names there alone, and so does its
    compiler for annotations. So there Triton's language and the closure's names are put as well.
    """
    import triton
    import triton.language

    names = {"tl": triton.language, **inspect.getclosurevars(function).nonlocals}
    for name, value in names.items():
        if function.__globals__.setdefault(name, value) is not value:
            raise CatalogError(f"{function.__module__}.{name} hides what {function.__name__!r} calls by that name")
    return triton.jit(function)


@functools.cache
def row_start() -> Any:
    """(pointer, row, tokens, batch_stride, token_stride) -> where rows [ROWS, 1] begin; None for the pointer None."""
    import triton.language as tl

    @jit
    def start_of_row(pointer, row, tokens, batch_stride, token_stride):  # type: ignore[no-untyped-def]
        start = pointer
        if pointer is not None:
            # 64 bits: rows times width passes 2^31 for video.
            start += (row // tokens).to(tl.int64) * batch_stride + (row % tokens).to(tl.int64) * token_stride
        return start

    return start_of_row


@functools.cache
def load_piece() -> Any:
    """(start, columns, column_stride, WIDTH, HINT) -> a tile of a row in float32, zero beyond the width."""
    import triton.language as tl

    @jit
    def load_piece_of_row(start, columns, column_stride, WIDTH: tl.constexpr, HINT: tl.constexpr):  # type: ignore[no-untyped-def]
        # 64 bits: a transposed tensor's columns may lie that far apart.
        place = start + columns.to(tl.int64) * column_stride
        return tl.load(place, mask=columns < WIDTH, other=0.0, eviction_policy=HINT).to(tl.float32)

    return load_piece_of_row


@functools.cache
def store_row() -> Any:
    """(start, row, WIDTH, TILE, PIECES): the epilogue of every kernel over rows.

    `row` is the finished row in float32, all of it, as a tuple of tiles; it is rounded to the dtype behind `start`. This
    is the one place for fp8: the row's largest magnitude, the scale from it and the rounding belong here.
    """
    import triton.language as tl

    @jit
    def store_whole_row(start, row, WIDTH: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
        for piece in tl.static_range(PIECES):
            columns = piece * TILE + tl.arange(0, TILE)[None, :]
            tl.store(start + columns, row[piece].to(start.dtype.element_ty), mask=columns < WIDTH)

    return store_whole_row
