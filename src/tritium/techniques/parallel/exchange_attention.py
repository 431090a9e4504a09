"""Attention over tokens that are split between ranks: heads or keys are exchanged, in functional collectives.

Ulysses exchanges tokens for heads, then each rank has some heads of all tokens. Otherwise keys and values are gathered,
or passed around a ring. With several axes, Ulysses comes first, and the others get its larger chunks of fewer heads.
Tensors are [B, H, S, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from tritium import compat
from tritium.errors import PipelineError
from tritium.techniques.parallel.exchange import (
    Grid,
    Segment,
    Segments,
    Tensor,
    cat,
    extended,
    gather,
    join,
    part,
    pieces_of,
    split,
    total,
    whole,
)

# Computes attention of q, k and v with a mask or None, and whether it is causal.
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool], Tensor]

# Chooses how an attention exchanges, by its queries on one rank.
Chooser = Callable[[Tensor], str]

# A collective that was started; a call waits for its result.
Started = Callable[[], Tensor]


@dataclass(frozen=True)
class Call:
    """One attention: how it is computed, and the segments of its queries and keys (None where they are whole)."""

    attend: Attend
    queries: Segments | None
    keys: Segments | None
    scale: float | None = None
    is_causal: bool = False


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, grid: Grid, exchange: str = "split"
) -> Tensor:
    """Compute attention of this rank's queries over the keys of all ranks, by the axes of a grid."""
    if call.keys is None:
        if call.queries is None or (mask is None and not call.is_causal):
            return call.attend(q, k, v, mask, call.is_causal)
        # This rank's queries have all heads and all keys.
        mask, _ = _checked(mask, q, replace(call, keys=(Segment(k.shape[2], False),)), keeps_causal=False)
        assert mask is not None
        return call.attend(q, k, v, split(mask, 2, call.queries, grid) if mask.shape[2] > 1 else mask, False)
    if call.queries is None:
        k, v = (join(x, 2, call.keys, grid) for x in (k, v))
        return call.attend(q, k, v, mask, call.is_causal)
    masked = _Mask.of(mask, q, call, grid)
    if grid.ulysses.size == 1:
        keys, values = (_Chunks.of(x, call.keys, grid) for x in (k, v))
        return _over_blocks(q, keys, values, masked, call, grid)
    return _ulysses(q, k, v, masked, call, grid, exchange)


@dataclass(frozen=True)
class _Chunks:
    """Keys or values of several chunks: split segments as [chunks, B, H, S, D], the others as [B, H, S, D]."""

    split: Tensor | None
    # The segments as this rank has them; split ones are not read.
    local: list[Tensor]

    @classmethod
    def of(cls, x: Tensor, segments: Segments, grid: Grid) -> _Chunks:
        local = pieces_of(x, 2, segments, grid)
        parts = [piece for piece, segment in zip(local, segments, strict=True) if segment.is_split]
        return cls(cat(parts, 2).unsqueeze(0) if parts else None, local)


# --- keys and values of other ranks ---


def _over_blocks(q: Tensor, k: _Chunks, v: _Chunks, mask: _Mask, call: Call, grid: Grid) -> Tensor:
    """Compute attention over the keys of all blocks: gathered, then passed around the ring."""
    assert call.keys is not None
    if k.split is None or v.split is None:
        return call.attend(q, cat(k.local, 2), cat(v.local, 2), mask.keys(0, 1), mask.is_causal)
    k_chunks, v_chunks = (gather(x, grid.gather) for x in (k.split, v.split))
    if grid.ring.size > 1:
        return _ring(q, (k_chunks, v_chunks), (k.local, v.local), mask, call, grid)
    keys, values = (whole(x, local, 2, call.keys, grid) for x, local in ((k_chunks, k.local), (v_chunks, v.local)))
    return call.attend(q, keys, values, mask.keys(0, 1), mask.is_causal)


def _ring(
    q: Tensor,
    blocks: tuple[Tensor, Tensor],
    local: tuple[list[Tensor], list[Tensor]],
    mask: _Mask,
    call: Call,
    grid: Grid,
) -> Tensor:
    """Pass keys and values around a ring, and merge the results by their log-sum-exp."""
    size, rank = grid.ring.size, grid.ring.rank
    merged: tuple[Tensor, Tensor] | None = None
    for step in range(size):
        block, is_first = (rank - step) % size, step == 0
        started = [grid.ring.pass_on(x) for x in blocks] if step < size - 1 else []
        chosen = _chosen(call.keys or (), grid, block, blocks[0].shape[0], is_first=is_first)
        if any(count for _, _, count in chosen):
            keys, values = (_rows(x, own, chosen) for x, own in zip(blocks, local, strict=True))
            columns = mask.keys(block, size, is_first=is_first)
            found = compat.attention.with_log_sum_exp(q, keys, values, columns, call.scale)
            merged = found if merged is None else _merged(*merged, *found)
        blocks = tuple(compat.collectives.wait(x) for x in started)  # type: ignore[assignment]
    assert merged is not None
    return merged[0].to(q.dtype)


def _chosen(
    segments: Segments, grid: Grid, block: int, chunks: int, *, is_first: bool
) -> list[tuple[int | None, int, int]]:
    """Return start, size and valid tokens of each segment in the chunks of a block.

    The start is None for a segment that is on every rank: it belongs to the first block.
    """
    found: list[tuple[int | None, int, int]] = []
    start = 0
    for segment in segments:
        if not segment.is_split:
            found.append((None, segment.length, segment.length if is_first else 0))
            continue
        share = segment.share(grid.size)
        rows = share * chunks
        found.append((start, share, max(0, min(rows, segment.length - block * rows))))
        start += share
    return found


def _rows(chunks: Tensor, local: Sequence[Tensor], chosen: Sequence[tuple[int | None, int, int]]) -> Tensor:
    """Return the keys of one block without repeated ones."""
    found = []
    for own, (start, share, count) in zip(local, chosen, strict=True):
        if not count:
            continue
        piece = own if start is None else chunks.narrow(3, start, share).movedim(0, 2).flatten(2, 3)
        found.append(piece.narrow(2, 0, count))
    return cat(found, 2)


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attentions of the same queries over different keys."""
    both = torch.logaddexp(lse, more_lse)
    # Queries that see no key have a log-sum-exp of minus infinity.
    top = both.masked_fill(both == -torch.inf, 0.0)
    return out * (lse - top).exp().unsqueeze(-1) + more * (more_lse - top).exp().unsqueeze(-1), both


# --- tokens for heads ---


def _ulysses(q: Tensor, k: Tensor, v: Tensor, mask: _Mask, call: Call, grid: Grid, exchange: str) -> Tensor:
    """Exchange tokens for heads, compute attention of some heads, and exchange back."""
    assert call.queries is not None
    assert call.keys is not None
    heads = q.shape[1]
    q, k, v = _whole_heads(q, k, v, grid.ulysses.size, is_alike=exchange not in ("packed", "split"))
    chunks = _head_chunks(exchange, q.shape[1] // grid.ulysses.size)
    start = _start_packed if exchange == "packed" else _start_apart
    trip = _Trip(call.queries, call.keys, grid)
    started = [start(trip, q, k, v, chunks[0])]
    backs = []
    for place, chunk in enumerate(chunks):
        if place + 1 < len(chunks):
            # The next heads are exchanged while these are computed.
            started.append(start(trip, q, k, v, chunks[place + 1]))
        q_chunks, k_chunks, v_chunks = (ready() for ready in started[place])
        parts = (trip.keys(k_chunks, k, chunk), trip.keys(v_chunks, v, chunk))
        out = _over_blocks(trip.queries(q_chunks, q, chunk), *parts, mask.heads(chunk), call, grid)
        backs.append(trip.back(out))
    heads_by_rank = cat([back() for back in backs], 2)
    return heads_by_rank.movedim(0, 1).flatten(1, 2).narrow(1, 0, heads)


def _whole_heads(q: Tensor, k: Tensor, v: Tensor, ranks: int, *, is_alike: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with as many heads for every rank: grouped ones are repeated, then zeros are added."""
    if k.shape[1] != q.shape[1] and (is_alike or q.shape[1] % ranks or k.shape[1] % ranks):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    missing = -q.shape[1] % ranks
    if missing:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    return q, k, v


# The first head of a chunk on a rank, and the number of heads; None for all, also where keys have fewer than queries.
_Heads = tuple[int, int] | None


def _head_chunks(exchange: str, heads: int) -> list[_Heads]:
    """Return the heads of a rank that are exchanged together; the last chunk is smaller if they do not divide."""
    if exchange in ("packed", "split"):
        return [None]
    size = -(-heads // int(exchange.removeprefix("chunks ")))
    return [(start, min(size, heads - start)) for start in range(0, heads, size)]


def _start_apart(trip: _Trip, q: Tensor, k: Tensor, v: Tensor, heads: _Heads) -> list[Started]:
    sent = (trip.sent(x, segments, heads) for x, segments in zip((q, k, v), trip.segments, strict=True))
    return [_waiting(trip.grid.ulysses.exchange(x)) for x in sent]


def _start_packed(trip: _Trip, q: Tensor, k: Tensor, v: Tensor, heads: _Heads) -> list[Started]:
    """Exchange q, k and v in one collective."""
    sent = [trip.sent(x, segments, heads) for x, segments in zip((q, k, v), trip.segments, strict=True)]
    shapes = [x.shape[1:] for x in sent]
    # Tensors that differ in heads alone or in tokens alone can be concatenated.
    dims = {place for shape in shapes for place in range(4) if shape[place] != shapes[0][place]}
    dim = 2 if not dims else 1 + min(dims)
    if len(dims) > 1:
        return _start_apart(trip, q, k, v, heads)
    packed = trip.grid.ulysses.exchange(torch.cat(sent, dim))
    unpacked: list[Tensor] = []

    def result(place: int) -> Tensor:
        if not unpacked:
            unpacked.extend(compat.collectives.wait(packed).split([x.shape[dim] for x in sent], dim))
        return unpacked[place]

    return [lambda: result(0), lambda: result(1), lambda: result(2)]


def _waiting(started: Tensor) -> Started:
    return lambda: compat.collectives.wait(started)


@dataclass(frozen=True)
class _Trip:
    """The way of tensors between tokens of one rank with all heads, and heads of one rank with more tokens."""

    query_segments: Segments
    key_segments: Segments
    grid: Grid

    @property
    def segments(self) -> tuple[Segments, Segments, Segments]:
        return self.query_segments, self.key_segments, self.key_segments

    @property
    def is_complete(self) -> bool:
        """True if all tokens are in one group, so that repeated ones can be cut."""
        return self.grid.ulysses.size == self.grid.size

    def _by_rank(self, x: Tensor, heads: _Heads) -> Tensor:
        """Return heads by the rank that computes them: [ranks, B, H, S, D]."""
        ranks = self.grid.ulysses.size
        x = x.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0)
        return x if heads is None else x.narrow(2, *heads)

    def sent(self, x: Tensor, segments: Segments, heads: _Heads) -> Tensor:
        """Return the tokens of split segments, by the rank that gets them."""
        local = pieces_of(self._by_rank(x, heads), 3, segments, self.grid)
        parts = [piece for piece, segment in zip(local, segments, strict=True) if segment.is_split]
        return cat(parts, 3)

    def _own(self, x: Tensor, segments: Segments, heads: _Heads) -> list[Tensor]:
        """Return the segments of this rank's heads."""
        return pieces_of(self._by_rank(x, heads).select(0, self.grid.ulysses.rank), 2, segments, self.grid)

    def keys(self, chunks: Tensor, x: Tensor, heads: _Heads) -> _Chunks:
        return _Chunks(chunks, self._own(x, self.key_segments, heads))

    def queries(self, chunks: Tensor, x: Tensor, heads: _Heads) -> Tensor:
        """Return the queries of all chunks; repeated ones stay where other ranks have the rest."""
        own = self._own(x, self.query_segments, heads)
        if self.is_complete:
            return whole(chunks, own, 2, self.query_segments, self.grid)
        found, start = [], 0
        for segment, piece in zip(self.query_segments, own, strict=True):
            share = segment.share(self.grid.size)
            found.append(chunks.narrow(3, start, share).movedim(0, 2).flatten(2, 3) if segment.is_split else piece)
            start += share if segment.is_split else 0
        return cat(found, 2)

    def back(self, out: Tensor) -> Started:
        """Exchange heads [B, H, S, D] for tokens: start, and return the function that waits for [ranks, B, H, S, D]."""
        ranks, found, start = self.grid.ulysses.size, [], 0
        for segment in self.query_segments:
            share = segment.share(self.grid.size)
            rows = share * ranks if segment.is_split else share
            valid = min(rows, segment.length) if self.is_complete else rows
            piece = out.narrow(2, start, valid)
            start += valid
            if segment.is_split:
                piece = extended(piece, piece.narrow(2, valid - 1, 1), 2, rows - valid)
                found.append(piece.unflatten(2, (ranks, share)).movedim(2, 0))
            else:
                # All ranks need all heads of a segment that is on every rank.
                found.append(torch.stack([piece] * ranks))
        return _waiting(self.grid.ulysses.exchange(cat(found, 3)))


# --- masks ---


@dataclass(frozen=True)
class _Mask:
    """A mask over all queries and keys, and the part of it for the queries and heads of a rank."""

    # [B, H, Sq, Sk], where each dim may be 1.
    value: Tensor | None
    is_causal: bool
    call: Call
    grid: Grid

    @classmethod
    def of(cls, value: Tensor | None, q: Tensor, call: Call, grid: Grid) -> _Mask:
        """Check a mask, and cut it to the queries and heads that this rank computes."""
        assert call.queries is not None
        is_complete = grid.ulysses.size == grid.size
        value, is_causal = _checked(value, q, call, keeps_causal=is_complete)
        if value is None:
            return cls(None, is_causal, call, grid)
        if value.shape[2] > 1 and not is_complete:
            value = part(value, 2, call.queries, grid.size, grid.block, grid.ulysses.size)
        if value.shape[1] > 1 and grid.ulysses.size > 1:
            missing = -value.shape[1] % grid.ulysses.size
            value = value if not missing else F.pad(value, (0, 0, 0, 0, 0, missing))
            heads = value.shape[1] // grid.ulysses.size
            value = value.narrow(1, grid.ulysses.rank * heads, heads)
        return cls(value, is_causal, call, grid)

    def heads(self, heads: _Heads) -> _Mask:
        if heads is None or self.value is None or self.value.shape[1] == 1:
            return self
        return replace(self, value=self.value.narrow(1, *heads))

    def keys(self, block: int, blocks: int, *, is_first: bool = True) -> Tensor | None:
        """Return the columns of one block of keys."""
        value = self.value
        if value is None or blocks == 1 or value.shape[3] == 1:
            return value
        found, start = [], 0
        chosen = _chosen(self.call.keys or (), self.grid, block, self.grid.size // blocks, is_first=is_first)
        for segment, (_, share, count) in zip(self.call.keys or (), chosen, strict=True):
            first = block * share * (self.grid.size // blocks) if segment.is_split else 0
            if count:
                found.append(value.narrow(3, start + first, count))
            start += segment.length
        return cat(found, 3)


def _checked(value: Tensor | None, q: Tensor, call: Call, *, keeps_causal: bool) -> tuple[Tensor | None, bool]:
    """Return a mask over all tokens in four dims, and whether attention is causal without it."""
    assert call.queries is not None
    assert call.keys is not None
    sizes = q.shape[1], total(call.queries), total(call.keys)
    is_causal = call.is_causal
    if is_causal and (not keeps_causal or value is not None):
        value, is_causal = _causal(value, sizes[1], sizes[2], q), False
    if value is None:
        return None, is_causal
    value = value[(None,) * (4 - value.dim())]
    for dim, size in enumerate(sizes, 1):
        if value.shape[dim] not in (1, size):
            raise PipelineError(
                f"attention over split tokens has a mask of shape {tuple(value.shape)}; it needs {size} or 1 in dim "
                f"{dim}, for all ranks together; run this part on one rank"
            )
    return value, is_causal


def _causal(mask: Tensor | None, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return a mask that also hides keys behind the query."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril()
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
