"""Choose which blocks stay on the device: a simulation of copies and computation, and a greedy search over it.

Blocks that do not stay share a few slots. Copies run one after another in the order in which blocks are needed; a copy
starts when the link and its slot are free. A block starts when the one before it has ended and its weights have arrived.
Steps repeat, so the copies for the next step begin at the end of this one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

SLOTS = (2, 3, 4)

# Simulated steps: the first ones fill the slots, the last one is like all later ones.
_STEPS = 4

# Blocks up to which all subsets are tried, and up to which blocks are exchanged on trial.
_ALL, _SWAPPED = 8, 24

# Schedules of one number of slots from which blocks are exchanged.
_STARTS = 3

# Streamed blocks of one size that the greedy search tries per turn: they differ only in their place.
_TRIED = 4

_ROUND = 1e-6


@dataclass(frozen=True)
class Block:
    """The bytes of a block's weights, and the milliseconds in which it computes."""

    size: int
    ms: float
    name: str = ""


@dataclass(frozen=True)
class Schedule:
    """Which blocks stay on the device, how many slots the others share, and what a step then takes."""

    blocks: tuple[Block, ...]
    resident: frozenset[int]
    slots: int
    # Bytes a millisecond from the host to the device.
    rate: float
    # Milliseconds of a step outside of the blocks.
    other_ms: float = 0.0

    @functools.cached_property
    def step_ms(self) -> float:
        return simulate(self.blocks, self.resident, self.slots, self.rate, self.other_ms)

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(place for place in range(len(self.blocks)) if place not in self.resident)

    @property
    def compute_ms(self) -> float:
        """The time of a step with all weights on the device."""
        return sum(block.ms for block in self.blocks) + self.other_ms

    @property
    def slot_size(self) -> int:
        return max((self.blocks[place].size for place in self.streamed), default=0)

    @property
    def size(self) -> int:
        """The bytes of weights and slots on the device."""
        return size_of(self.blocks, self.resident, self.slots)

    @property
    def needed_share(self) -> float:
        """The share of the weights that has to stay on the device for copies to cost no time."""
        total = sum(block.size for block in self.blocks)
        return max(0.0, 1.0 - self.compute_ms * self.rate / total) if total else 0.0


def size_of(blocks: Sequence[Block], resident: Iterable[int], slots: int) -> int:
    """Return the bytes of resident blocks, and of slots for the largest of the others."""
    kept = set(resident)
    streamed = [block.size for place, block in enumerate(blocks) if place not in kept]
    return sum(blocks[place].size for place in kept) + min(slots, len(streamed)) * max(streamed, default=0)


def simulate(blocks: Sequence[Block], resident: Iterable[int], slots: int, rate: float, other_ms: float = 0.0) -> float:
    """Return the milliseconds of a step once steps repeat."""
    kept = set(resident)
    count = len(blocks) - len(kept)
    link = clock = step = 0.0
    free = [0.0] * slots
    for _ in range(_STEPS):
        start, turn = clock, 0
        for place, block in enumerate(blocks):
            if place in kept:
                clock += block.ms
                continue
            slot = turn % slots
            # A block that has a slot to itself stays in it.
            if slot + slots < count or turn >= slots:
                link = max(link, free[slot]) + block.size / rate
                clock = max(clock, link)
            clock += block.ms
            free[slot] = clock
            turn += 1
        clock += other_ms
        step = clock - start
    return step


def choose(
    blocks: Sequence[Block], space: int, rate: float, other_ms: float = 0.0, slots: int | None = None
) -> Schedule | None:
    """Return the schedule of the shortest step that fits into some bytes, or None if none fits."""
    blocks = tuple(blocks)
    everything = frozenset(range(len(blocks)))
    if size_of(blocks, everything, 0) <= space:
        return Schedule(blocks, everything, 0, rate, other_ms)
    best = []
    for count in SLOTS if slots is None else (slots,):
        if len(blocks) <= _ALL:
            fitting = (kept for kept in _subsets(len(blocks)) if size_of(blocks, kept, count) <= space)
            best += [Schedule(blocks, kept, count, rate, other_ms) for kept in fitting]
            continue
        found = [Schedule(blocks, kept, count, rate, other_ms) for kept in _candidates(blocks, space, count)]
        grown = sorted((_grown(schedule, space) for schedule in found), key=_cost)
        best += [_swapped(schedule, space) for schedule in grown[:_STARTS]]
    return min(best, key=_cost, default=None)


def _subsets(count: int) -> Iterator[frozenset[int]]:
    for size in range(count):
        yield from map(frozenset, itertools.combinations(range(count), size))


def _cost(schedule: Schedule) -> tuple[float, int]:
    """Order schedules by time, then by bytes that are copied in a step."""
    return round(schedule.step_ms, 6), sum(schedule.blocks[place].size for place in schedule.streamed)


def _candidates(blocks: Sequence[Block], space: int, slots: int) -> Iterator[frozenset[int]]:
    """Yield sets to start from: none, and all blocks larger than a size; each also filled up with evenly spread ones."""
    for limit in sorted({block.size for block in blocks}, reverse=True):
        start = frozenset(place for place, block in enumerate(blocks) if block.size > limit)
        if size_of(blocks, start, slots) > space:
            continue
        yield start
        kept = set(start)
        for place in _spread(len(blocks)):
            if place not in kept and size_of(blocks, kept | {place}, slots) <= space:
                kept.add(place)
        yield frozenset(kept)


def _spread(count: int) -> Iterator[int]:
    """Yield numbers below a count in an order in which every beginning is evenly spread.

    >>> list(_spread(5))
    [0, 4, 2, 1, 3]
    """
    bits = max(1, (count - 1).bit_length())
    for number in range(1 << bits):
        place = int(f"{number:0{bits}b}"[::-1], 2)
        if place < count:
            yield place


def _grown(schedule: Schedule, space: int) -> Schedule:
    """Add the block that shortens the step most for its bytes until nothing more fits; return the best on the way."""
    best = schedule
    while True:
        best = min(best, schedule, key=_cost)
        fitting = [place for place in schedule.streamed if _with(schedule, place).size <= space]
        if not fitting:
            return best
        by_size: dict[int, list[int]] = {}
        for place in fitting:
            by_size.setdefault(schedule.blocks[place].size, []).append(place)
        tried = [place for places in by_size.values() for place in places[:: max(1, len(places) // _TRIED)]]
        schedule = min((_with(schedule, place) for place in tried), key=_gain_order(schedule))


def _gain_order(before: Schedule) -> Callable[[Schedule], tuple[float, float]]:
    def order(after: Schedule) -> tuple[float, float]:
        (added,) = after.resident - before.resident
        gain = (before.step_ms - after.step_ms) / max(1, before.blocks[added].size)
        return -round(gain, 15), -before.blocks[added].size

    return order


def _with(schedule: Schedule, place: int) -> Schedule:
    return _changed(schedule, schedule.resident | {place})


def _changed(schedule: Schedule, resident: frozenset[int]) -> Schedule:
    return Schedule(schedule.blocks, resident, schedule.slots, schedule.rate, schedule.other_ms)


def _swapped(schedule: Schedule, space: int) -> Schedule:
    """Take up to two blocks out and one in as long as that shortens the step, in models of few blocks."""
    while len(schedule.blocks) <= _SWAPPED and schedule.step_ms > schedule.compute_ms + _ROUND:
        kept = schedule.resident
        out = [(), *itertools.combinations(kept, 1), *itertools.combinations(kept, 2)]
        trials = [_changed(schedule, kept.difference(gone) | new) for gone in out for new in _single(schedule.streamed)]
        fitting = [trial for trial in trials if trial.size <= space]
        best = min(fitting, key=_cost)
        best = min(best, _grown(best, space), key=_cost)
        if best.step_ms >= schedule.step_ms - _ROUND:
            return schedule
        schedule = best
    return schedule


def _single(places: Iterable[int]) -> list[frozenset[int]]:
    return [frozenset(), *(frozenset({place}) for place in places)]
