"""Place experts on devices so that the largest load of a device is small; frequently used experts may have copies.

A pure function of loads. The load of an expert is divided equally between its copies.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tritium.errors import ArgumentError

# The experts of each device, in ascending order.
Placement = tuple[tuple[int, ...], ...]

# All placements are tried if there are at most this many.
_EXHAUSTIVE = 4096

# Changes of one placement; each makes the largest load smaller.
_ROUNDS = 64

# Greedy placements that are improved, with different numbers of copies.
_STARTS = 4

# Loads closer than this share are equal.
_EQUAL = 1e-9


def plan_placement(
    loads: Sequence[float],
    devices: int,
    slots: int,
    current: Sequence[Sequence[int]] | None = None,
    max_moves: int | None = None,
) -> Placement:
    """Return the experts of each device so that the largest load of a device is as small as found.

    The result is never worse than `current`. It is optimal if there are few placements, as with four experts.

    Args:
        loads: The load of each expert, such as the number of tokens that chose it in an image.
        devices: The number of devices.
        slots: The number of experts that a device can hold. More slots than experts need hold copies.
        current: The experts of each device now.
        max_moves: The largest number of experts that may be copied to a device where they are not now.

    >>> plan_placement([6, 1, 1, 4], devices=2, slots=2)
    ((0, 1), (2, 3))
    >>> plan_placement([8, 1, 1, 2], devices=2, slots=3)
    ((0, 1, 2), (0, 3))
    """
    values = _checked_loads(loads)
    _check_sizes(len(values), devices, slots)
    now = None if current is None else _checked_placement(current, len(values), devices, slots)
    if max_moves is not None and (now is None or isinstance(max_moves, bool) or max_moves < 0):
        raise ArgumentError(f"max_moves={max_moves!r} limits the changes of `current`; give both, and a number from 0")
    slots = min(slots, len(values))
    candidates: Iterator[Placement]
    if _count(len(values), devices, slots, is_ordered=now is not None) <= _EXHAUSTIVE:
        candidates = _all(len(values), devices, slots, is_ordered=now is not None)
    else:
        candidates = _found(values, devices, slots, now, max_moves)
    return _best_of(candidates, values, now, max_moves)


def _best_of(
    candidates: Iterator[Placement], loads: list[float], now: Placement | None, max_moves: int | None
) -> Placement:
    """Return the placement with the smallest largest load, of several the one with the fewest moves."""
    best = None if now is None else (now, largest_load(loads, now), 0)
    for placement in candidates:
        load = largest_load(loads, placement)
        moves = 0 if now is None else moves_of(now, placement)
        if max_moves is not None and moves > max_moves:
            continue
        if best is None or _is_better((load, moves), best[1:]):
            best = placement, load, moves
    assert best is not None
    return best[0]


def _is_better(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """Compare the largest loads, and then the moves."""
    if math.isclose(one[0], other[0], rel_tol=_EQUAL, abs_tol=_EQUAL):
        return one[1] < other[1]
    return one[0] < other[0]


def device_loads(loads: Sequence[float], placement: Placement) -> list[float]:
    """Return the load of each device."""
    copies = [0] * len(loads)
    for expert in itertools.chain(*placement):
        copies[expert] += 1
    return [sum(loads[expert] / copies[expert] for expert in device) for device in placement]


def largest_load(loads: Sequence[float], placement: Placement) -> float:
    return max(device_loads(loads, placement))


def moves_of(before: Placement, after: Placement) -> int:
    """Return the number of experts that devices hold after a change and did not hold before."""
    return sum(len(set(new).difference(old)) for old, new in zip(before, after, strict=True))


# --- arguments ---


def _checked_loads(loads: Any) -> list[float]:
    values = [float(load) for load in loads]
    if not values or not all(math.isfinite(load) and load >= 0 for load in values):
        raise ArgumentError(f"loads must be numbers from 0, one for each expert; got {values}")
    return values


def _check_sizes(experts: int, devices: int, slots: int) -> None:
    for name, value in (("devices", devices), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} must be a number from 1, got {value!r}")
    if devices * slots < experts:
        raise ArgumentError(
            f"{devices} devices with {slots} slots hold {devices * slots} experts, and there are {experts}; give "
            f"{-(-experts // devices)} slots"
        )


def _checked_placement(current: Sequence[Sequence[int]], experts: int, devices: int, slots: int) -> Placement:
    placement = tuple(tuple(sorted(device)) for device in current)
    held = set(itertools.chain(*placement))
    if len(placement) != devices or held != set(range(experts)):
        raise ArgumentError(f"current must place each of {experts} experts on {devices} devices; got {placement}")
    for device in placement:
        if len(device) > slots or len(set(device)) < len(device):
            raise ArgumentError(f"current must place at most {slots} different experts on a device; got {device}")
    return placement


# --- candidates ---


def _count(experts: int, devices: int, slots: int, *, is_ordered: bool) -> int:
    of_one = sum(math.comb(experts, size) for size in range(1, slots + 1))
    return of_one**devices if is_ordered else math.comb(of_one + devices - 1, devices)


def _all(experts: int, devices: int, slots: int, *, is_ordered: bool) -> Iterator[Placement]:
    """Yield all placements; without a current one, devices are interchangeable."""
    sizes = range(1, slots + 1)
    of_one = [held for size in sizes for held in itertools.combinations(range(experts), size)]
    several: Iterator[Placement] = (
        itertools.product(of_one, repeat=devices)
        if is_ordered
        else itertools.combinations_with_replacement(sorted(of_one), devices)
    )
    return (placement for placement in several if len(set().union(*placement)) == experts)


def _found(
    loads: list[float], devices: int, slots: int, current: Placement | None, max_moves: int | None
) -> Iterator[Placement]:
    """Yield greedy placements and the current one, each with later ones that are better."""
    room = devices * slots - len(loads)
    for spare in sorted({0, room, *(room * part // _STARTS for part in range(1, _STARTS))}):
        packed = _packed(loads, devices, slots, spare)
        start = packed if current is None else _relabelled(packed, current)
        yield from _improved(loads, start, slots, lambda _: True)
    if current is None:
        return

    def is_near(placement: Placement) -> bool:
        return max_moves is None or moves_of(current, placement) <= max_moves

    yield from _improved(loads, current, slots, is_near)
    # Few moves are better spent between the devices that differ the most.
    yield from _swapped(loads, current, is_near)


def _swapped(loads: list[float], placement: Placement, is_allowed: Callable[[Placement], bool]) -> Iterator[Placement]:
    """Yield placements that follow from one by swaps which halve the difference of the most and the least loaded device."""
    copies = Counter(itertools.chain(*placement))
    for _ in range(_ROUNDS):
        by_device = device_loads(loads, placement)
        low, high = (pick(range(len(by_device)), key=by_device.__getitem__) for pick in (min, max))
        difference = by_device[high] - by_device[low]
        gains = {
            (mine, theirs): loads[mine] / copies[mine] - loads[theirs] / copies[theirs]
            for mine, theirs in itertools.product(placement[high], placement[low])
            if mine not in placement[low] and theirs not in placement[high]
        }
        gains = {pair: gain for pair, gain in gains.items() if 0 < gain < difference}
        if not gains:
            return
        mine, theirs = min(gains, key=lambda pair: abs(gains[pair] - difference / 2))
        placement = _with(placement, {high: (mine, theirs), low: (theirs, mine)})
        if not is_allowed(placement):
            return
        yield placement


def _copies(loads: list[float], devices: int, spare: int) -> list[int]:
    """Give each spare slot to the expert with the largest load of a copy."""
    copies = [1] * len(loads)
    for _ in range(spare):
        able = [expert for expert, count in enumerate(copies) if count < devices]
        if not able:
            break
        copies[max(able, key=lambda expert: loads[expert] / copies[expert])] += 1
    return copies


def _packed(loads: list[float], devices: int, slots: int, spare: int) -> Placement:
    """Put copies on devices, the largest first, each on the least loaded device that can take it."""
    copies = _copies(loads, devices, spare)
    items = [expert for expert, count in enumerate(copies) for _ in range(count)]
    items.sort(key=lambda expert: -loads[expert] / copies[expert])
    held: list[list[int]] = [[] for _ in range(devices)]
    sums = [0.0] * devices
    for expert in items:
        able = [device for device in range(devices) if len(held[device]) < slots and expert not in held[device]]
        # The only devices with room may hold the expert already: it has one copy less.
        if able:
            device = min(able, key=lambda one: (sums[one], len(held[one])))
            held[device].append(expert)
            sums[device] += loads[expert] / copies[expert]
    return tuple(tuple(sorted(device)) for device in held)


def _relabelled(placement: Placement, current: Placement) -> Placement:
    """Return the same sets of experts, each on a device that holds many of them."""
    left = set(range(len(current)))
    by_device: list[tuple[int, ...]] = [()] * len(current)
    pairs = itertools.product(range(len(current)), enumerate(placement))
    common = sorted((-len(set(held).intersection(current[device])), device, place) for device, (place, held) in pairs)
    taken: set[int] = set()
    for _, device, place in common:
        if device in left and place not in taken:
            left.remove(device)
            taken.add(place)
            by_device[device] = placement[place]
    return tuple(by_device)


def _improved(
    loads: list[float], placement: Placement, slots: int, is_allowed: Callable[[Placement], bool]
) -> Iterator[Placement]:
    """Yield a placement, and better ones that follow from it by one change each."""
    yield placement
    for _ in range(_ROUNDS):
        before = largest_load(loads, placement)
        changed = [(largest_load(loads, one), one) for one in _changes(loads, placement, slots) if is_allowed(one)]
        if not changed or min(changed)[0] >= before * (1 - _EQUAL):
            return
        placement = min(changed)[1]
        yield placement


def _changes(loads: list[float], placement: Placement, slots: int) -> Iterator[Placement]:
    """Yield changes that take load from the most loaded device: swaps, moves and copies."""
    by_device = device_loads(loads, placement)
    source = max(range(len(by_device)), key=by_device.__getitem__)
    for mine in placement[source]:
        if sum(mine in device for device in placement) > 1:
            yield _with(placement, {source: (mine, None)})
    for other in range(len(placement)):
        if other == source:
            continue
        # A swap with a device, a move or a copy to it, or a copy in place of an expert that has others.
        for mine in placement[source]:
            if mine in placement[other]:
                continue
            for theirs in placement[other]:
                if theirs not in placement[source]:
                    yield _with(placement, {source: (mine, theirs), other: (theirs, mine)})
                if sum(theirs in device for device in placement) > 1:
                    yield _with(placement, {other: (theirs, mine)})
            if len(placement[other]) < slots:
                yield _with(placement, {other: (None, mine)})
                if len(placement[source]) > 1:
                    yield _with(placement, {source: (mine, None), other: (None, mine)})


def _with(placement: Placement, changes: dict[int, tuple[int | None, int | None]]) -> Placement:
    """Return a placement with (out, in) changed on some devices."""
    result = list(placement)
    for device, (out, into) in changes.items():
        held = [expert for expert in placement[device] if expert != out] + ([] if into is None else [into])
        result[device] = tuple(sorted(held))
    return tuple(result)
