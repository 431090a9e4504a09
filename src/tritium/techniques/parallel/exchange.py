"""Split streams of tokens between ranks, and join them, in functional collectives.

Each stream of tokens is split alone: a rank has `share` consecutive tokens of it, and the last one is repeated until all
ranks have as many. Repeated tokens stay equal to the last one through a model, and are cut where a stream is whole. So
sizes are equal on all ranks, and none is communicated.

The ranks of a stream's chunks are numbered by (ring, gather, ulysses), the last innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tritium import compat
from tritium.techniques.parallel.mesh import Axis, Mesh

Tensor = torch.Tensor


class Segment(NamedTuple):
    """A run of tokens in a dim: `length` tokens of one stream, of which a rank has a share if it is split.

    A uniform segment has `length` equal values, such as a mask of ones, and fits any stream.
    """

    length: int
    is_split: bool = True
    is_uniform: bool = False

    def share(self, ranks: int) -> int:
        """Return the number of tokens on one rank.

        It is at least 2: operators broadcast a dim of size 1, and views cannot tell it from others.
        """
        return max(2, -(-self.length // ranks)) if self.is_split else self.length


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class Line:
    """One axis of the mesh, in plain values, of which graphs can be made."""

    size: int = 1
    rank: int = 0
    group: str = ""

    @classmethod
    def of(cls, axis: Axis) -> Line:
        return cls(axis.size, axis.rank, compat.collectives.name_of(axis.group)) if axis.size > 1 else cls()

    def exchange(self, x: Tensor) -> Tensor:
        """Start to exchange x [ranks, ...], of which every rank gets one entry."""
        return compat.collectives.start_all_to_all(x.contiguous(), self.group, [1] * self.size, [1] * self.size)

    def pass_on(self, x: Tensor) -> Tensor:
        """Start to send a tensor to the next rank, and to receive one from the rank before."""
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = received[(self.rank - 1) % self.size] = x.shape[0]
        return compat.collectives.start_all_to_all(x.contiguous(), self.group, sent, received)


@dataclass(frozen=True)
class Grid:
    """The axes that split tokens."""

    ring: Line = Line()
    gather: Line = Line()
    ulysses: Line = Line()

    @classmethod
    def of(cls, mesh: Mesh) -> Grid:
        return cls(Line.of(mesh["ring"]), Line.of(mesh["gather"]), Line.of(mesh["ulysses"]))

    @property
    def size(self) -> int:
        return self.ring.size * self.gather.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.block * self.ulysses.size + self.ulysses.rank

    @property
    def block(self) -> int:
        """Return the number of this rank's group of Ulysses."""
        return self.ring.rank * self.gather.size + self.gather.rank

    def local(self, segments: Segments) -> int:
        """Return the size of a dim with these segments on one rank."""
        return sum(segment.share(self.size) for segment in segments)


def total(segments: Segments) -> int:
    return sum(segment.length for segment in segments)


# --- between whole and split streams ---


def split(x: Tensor, dim: int, segments: Segments, grid: Grid) -> Tensor:
    """Return this rank's part of a whole dim."""
    return part(x, dim, segments, grid.size, grid.rank, 1)


def join(x: Tensor, dim: int, segments: Segments, grid: Grid) -> Tensor:
    """Return a whole dim from the parts of all ranks."""
    dim = dim % x.dim()
    pieces = pieces_of(x, dim, segments, grid)
    if not any(segment.is_split for segment in segments):
        return x
    parts = [piece for piece, segment in zip(pieces, segments, strict=True) if segment.is_split]
    gathered = _gather_all(cat(parts, dim).unsqueeze(0), grid)
    return whole(gathered, pieces, dim, segments, grid)


def whole(chunks: Tensor, local: Sequence[Tensor], dim: int, segments: Segments, grid: Grid) -> Tensor:
    """Return the whole dim: split segments are cut from chunks [ranks, ...], the others are local."""
    found, start = [], 0
    for segment, piece in zip(segments, local, strict=True):
        if not segment.is_split:
            found.append(piece)
            continue
        share = segment.share(grid.size)
        rows = chunks.narrow(dim + 1, start, share).movedim(0, dim).flatten(dim, dim + 1)
        found.append(rows.narrow(dim, 0, segment.length))
        start += share
    return cat(found, dim)


def _gather_all(x: Tensor, grid: Grid) -> Tensor:
    """Return the tensors [1, ...] of all ranks as [ranks, ...]."""
    for line in (grid.ulysses, grid.gather, grid.ring):
        x = gather(x, line)
    return x


def gather(x: Tensor, line: Line) -> Tensor:
    if line.size == 1:
        return x
    if x.dtype == torch.bool:
        # Not every backend has booleans.
        return gather(x.to(torch.uint8), line).to(x.dtype)
    return compat.collectives.wait(compat.collectives.start_all_gather(x.contiguous(), line.size, line.group))


def part(x: Tensor, dim: int, segments: Segments, ranks: int, block: int, chunks: int) -> Tensor:
    """Return the rows of one block of chunks of a whole dim; the last row is repeated where the block ends later."""
    found, start = [], 0
    for segment in segments:
        if not segment.is_split:
            found.append(x.narrow(dim, start, segment.length))
        else:
            rows = segment.share(ranks) * chunks
            first = min(block * rows, segment.length)
            count = min(rows, segment.length - first)
            piece = x.narrow(dim, start + first, count)
            last = x.narrow(dim, start + segment.length - 1, 1)
            found.append(extended(piece, last, dim, rows - count))
        start += segment.length
    return cat([piece for piece in found if piece.shape[dim]], dim)


def extended(x: Tensor, last: Tensor, dim: int, count: int) -> Tensor:
    return torch.cat([x, last.repeat_interleave(count, dim=dim)], dim) if count else x


def pieces_of(x: Tensor, dim: int, segments: Segments, grid: Grid) -> list[Tensor]:
    shares = [segment.share(grid.size) for segment in segments]
    return list(x.split(shares, dim)) if len(shares) > 1 else [x]


def cat(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0]
