"""Estimate the time of a pointwise kernel by its tiling: memory or index arithmetic, the longer one.

The constants are picoseconds per element on an H200, from kernels of one kind in both forms: a pad of
[1, 96, 2, 544, 960] with one flat grid takes 0.78 ms with six 32-bit divisions per element, 3.47 ms with six 64-bit
ones, and 0.23 ms with none. Cut into rows of all channels, with five 32-bit divisions in a row, it takes 0.70 ms. Only
ratios matter, and a tiling is replaced only if the model predicts a clear gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

# Inductor counts written bytes twice, since an uncoalesced store costs more; 4.3 TB/s for a copy.
PS_PER_BYTE = 0.155
# A warp that reads 32 distant addresses moves 32 bytes for each: 8 times the 4 bytes of an element.
UNCOALESCED = 8.0
# A division or remainder by a value that is known at run time, and by a constant.
PS_PER_DIVISION = {32: 0.7, 64: 2.9}
PS_PER_CONSTANT_DIVISION = 0.1
# Neighbouring elements have one quotient if the divisor is a multiple of 16: Triton then divides once for all elements
# of a thread. Measured on a nearest upsample with 128 channels inside: a quarter.
SHARED = 0.25
SHARED_FROM = 16

# Elements of a tile, and the most along its innermost dim: the start values of Inductor's heuristics.
TILE = 1024
TILE_INNER = 64
# Tiles that one multiprocessor processes at a time.
TILES_PER_MULTIPROCESSOR = 8

# The share of the shorter of memory and arithmetic that the longer one does not hide. A guess: of tilings with equal
# memory traffic, it prefers the one with less arithmetic.
NOT_HIDDEN = 0.2

# Another tiling is chosen only if its predicted time is lower than that of Inductor's by this factor.
LEAST_GAIN = 1.2
# Each additional dim makes tiles thinner and masks longer.
PER_DIM = 0.03

# CUDA's limit on blocks along y and z.
MOST_BLOCKS = 65_535


@dataclass(frozen=True)
class Loop:
    """One loop of the iteration space; sequences of loops start with the outermost."""

    size: int
    is_symbolic: bool = False
    # The largest known integer factor of the size.
    known_factor: int = 1
    # Bytes whose access is coalesced if this loop is innermost in a tile dim.
    bytes: int = 0
    # Divisions in index expressions that depend on this loop: by symbols, and by constants.
    divisions: int = 0
    constant_divisions: int = 0


@dataclass(frozen=True)
class Workload:
    """The properties of a kernel that do not depend on its tiling."""

    loops: tuple[Loop, ...]
    # Bytes that no tiling coalesces.
    scattered_bytes: int = 0
    index_bits: int = 32
    multiprocessors: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(loop.size for loop in self.loops)


# Positions where the loops are cut into tile dims: () is one flat grid, (2,) puts the first two loops into y.
Cuts = tuple[int, ...]


def all_cuts(loops: int, most_dims: int) -> Iterator[Cuts]:
    """Yield every way to form up to `most_dims` dims of consecutive loops.

    >>> list(all_cuts(3, 2))
    [(), (1,), (2,)]
    """
    for dims in range(1, most_dims + 1):
        yield from combinations(range(1, loops), dims - 1)


def groups(workload: Workload, cuts: Cuts) -> list[Sequence[Loop]]:
    edges = [0, *cuts, len(workload.loops)]
    return [workload.loops[start:end] for start, end in pairwise(edges)]


def cost(workload: Workload, cuts: Cuts) -> float:
    """Return the estimated picoseconds per element.

    >>> inner = Loop(962, is_symbolic=True, bytes=6 * 96 * 546 * 962)
    >>> padded = Workload((Loop(96), Loop(546, is_symbolic=True), inner))
    >>> cost(padded, (2,)) < cost(padded, ())
    True
    """
    dims = groups(workload, cuts)
    sizes = [math.prod(loop.size for loop in dim) for dim in dims]
    tile = tile_of(sizes)
    blocks = [math.ceil(size / block) for size, block in zip(sizes, tile, strict=True)]
    padding = math.prod(count * block / size for count, block, size in zip(blocks, tile, sizes, strict=True) if size)
    waste = padding * last_wave_waste(math.prod(blocks), workload.multiprocessors)
    shorter, longer = sorted([_memory(workload, dims), _arithmetic(workload, dims, tile)])
    return (longer + NOT_HIDDEN * shorter) * waste * (1 + PER_DIM * (len(dims) - 1))


def tile_of(sizes: Sequence[int]) -> list[int]:
    """Return the likely tile for these sizes: powers of two, wide along the innermost dim."""
    left, tile = TILE, []
    for position, size in enumerate(reversed(sizes)):
        most = left if position == len(sizes) - 1 else TILE_INNER
        # The next power of two.
        block = min(1 << max(size - 1, 0).bit_length(), most, left)
        tile.append(block)
        left = max(left // block, 1)
    return tile[::-1]


def last_wave_waste(tiles: int, multiprocessors: int | None) -> float:
    """Return the factor by which the kernel is slower because its last wave of tiles is incomplete.

    >>> last_wave_waste(1056, 132), last_wave_waste(1057, 132) > 1.9
    (1.0, True)
    """
    if multiprocessors is None:
        return 1.0
    waves = tiles / (multiprocessors * TILES_PER_MULTIPROCESSOR)
    # Below one wave, every tiling leaves part of the device idle, and Inductor adapts the tile size.
    return math.ceil(waves) / waves if waves > 1 else 1.0


def _memory(workload: Workload, dims: Sequence[Sequence[Loop]]) -> float:
    total = sum(loop.bytes for loop in workload.loops)
    coalesced = 0.0
    for dim in dims:
        # Runs of less than 8 elements use only a part of each transaction.
        coalesced += dim[-1].bytes * min(math.prod(loop.size for loop in dim), 8) / 8
    scattered = total - coalesced + workload.scattered_bytes
    return PS_PER_BYTE * (coalesced + UNCOALESCED * scattered) / max(workload.elements, 1)


def _arithmetic(workload: Workload, dims: Sequence[Sequence[Loop]], tile: Sequence[int]) -> float:
    elements = math.prod(tile)
    prices = [_divisions(dim, PS_PER_DIVISION[workload.index_bits]) for dim in dims]
    # Arithmetic of a single dim is computed once per row of the tile. The innermost dim is an exception, unless
    # another dim is coalesced too: neighbours along it belong to one thread, which then holds a single row.
    shares = [block / elements for block in tile]
    if not any(dim[-1].bytes for dim in dims[:-1]):
        shares[-1] = 1.0
    return sum(price * share for price, share in zip(prices, shares, strict=True))


def _divisions(dim: Sequence[Loop], price: float) -> float:
    total, inside, known, is_symbolic = 0.0, 1, 1, False
    for position in reversed(range(len(dim))):
        loop = dim[position]
        share = SHARED if known % SHARED_FROM == 0 else 1.0
        if inside > 1:
            total += (price if is_symbolic else PS_PER_CONSTANT_DIVISION) * share
        if position > 0:
            total += (price if loop.is_symbolic else PS_PER_CONSTANT_DIVISION) * share
        total += (loop.divisions * price + loop.constant_divisions * PS_PER_CONSTANT_DIVISION) * share
        inside *= loop.size
        known *= loop.known_factor
        is_symbolic = is_symbolic or loop.is_symbolic
    return total
