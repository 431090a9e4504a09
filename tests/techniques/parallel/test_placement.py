"""Experts on devices: `tritium.plan_placement` against brute force, and what holds for every result."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritium
from tritium.errors import ArgumentError
from tritium.techniques.parallel import placement


def largest(loads, placed):
    """The largest load of a device, each expert's load divided between its copies."""
    copies = {expert: sum(expert in device for device in placed) for expert in range(len(loads))}
    return max(sum(loads[expert] / copies[expert] for expert in device) for device in placed)


def moved(before, after):
    return sum(expert not in old for old, new in zip(before, after, strict=True) for expert in new)


def brute_force(loads, devices, slots, current=None, max_moves=None):
    """The smallest largest load over all placements, by counting through all subsets."""
    subsets = [
        tuple(expert for expert in range(len(loads)) if bits >> expert & 1) for bits in range(1, 1 << len(loads))
    ]
    several = itertools.product([one for one in subsets if len(one) <= slots], repeat=devices)
    return min(
        largest(loads, placed)
        for placed in several
        if len(set().union(*placed)) == len(loads) and (max_moves is None or moved(current, placed) <= max_moves)
    )


def linear(experts, devices):
    share = -(-experts // devices)
    return [range(experts)[start : start + share] for start in range(0, experts, share)]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=4), st.integers(1, 2), st.integers(0, 2), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_brute_force_agrees(loads, devices, more, moves):
    slots = -(-len(loads) // devices) + more
    placed = tritium.plan_placement(loads, devices, slots)
    assert largest(loads, placed) == pytest.approx(brute_force(loads, devices, slots))
    current = linear(len(loads), devices)
    if len(current) == devices:
        nearby = tritium.plan_placement(loads, devices, slots, current, moves)
        assert moved(current, nearby) <= moves
        assert largest(loads, nearby) == pytest.approx(brute_force(loads, devices, slots, current, moves))


@given(
    st.lists(st.floats(0, 1e6), min_size=16, max_size=32), st.sampled_from([2, 4, 8]), st.integers(0, 4),
    st.sampled_from([None, 0, 1, 3]),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_many_experts(loads, devices, more, max_moves):
    slots = -(-len(loads) // devices) + more
    current = linear(len(loads), devices)
    if len(current) < devices:
        return
    placed = tritium.plan_placement(loads, devices, slots, current, max_moves)
    assert len(placed) == devices
    assert set().union(*placed) == set(range(len(loads)))
    assert all(len(set(device)) == len(device) <= slots for device in placed)
    assert largest(loads, placed) <= largest(loads, current) * (1 + 1e-9)
    assert max_moves is None or moved(current, placed) <= max_moves
    again = tritium.plan_placement(loads, devices, slots, placed)
    assert largest(loads, again) <= largest(loads, placed) * (1 + 1e-9)


def test_search_is_near_the_optimum(monkeypatch):
    """The ratio to brute force of what larger problems run, on 40 draws of 6 experts."""
    monkeypatch.setattr(placement, "_EXHAUSTIVE", 0)
    rng, ratios = random.Random(0), []
    for _ in range(40):
        loads = [rng.expovariate(1) for _ in range(6)]
        found = tritium.plan_placement(loads, 2, 4)
        ratios.append(largest(loads, found) / brute_force(loads, 2, 4))
    assert min(ratios) > 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.01
    assert max(ratios) < 1.1


def by_copies(loads, devices, slots):
    """The policy `AG` of MindIE SD: spread experts by their number, then copy as long as the largest load decreases."""
    placed = [set() for _ in range(devices)]
    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
        min(placed, key=len).add(expert)
    while True:
        best = largest(loads, placed)
        more = None
        for device, expert in itertools.product(range(devices), range(len(loads))):
            if expert not in placed[device] and len(placed[device]) < slots:
                copied = [held | {expert} if place == device else held for place, held in enumerate(placed)]
                if largest(loads, copied) < best:
                    best, more = largest(loads, copied), copied
        if more is None:
            return placed
        placed = more


def by_swaps(loads, current, swaps):
    """Its policy `EX`: swap the pair of the most and the least loaded device that halves their difference best."""
    placed = [set(held) for held in current]
    for _ in range(swaps):
        low, high = sorted(placed, key=lambda held: sum(loads[expert] for expert in held))[:: len(placed) - 1]
        half = (sum(loads[expert] for expert in high) - sum(loads[expert] for expert in low)) / 2
        one, other = min(itertools.product(high, low), key=lambda pair: abs(loads[pair[0]] - loads[pair[1]] - half))
        if not 0 < loads[one] - loads[other] < 2 * half:
            break
        for held, gone, new in ((high, one, other), (low, other, one)):
            held.remove(gone)
            held.add(new)
    return placed


@pytest.mark.parametrize(
    ("experts", "devices", "slots"),
    [(4, 2, 3), (16, 4, 5), (32, 4, 8), pytest.param(64, 8, 9, marks=pytest.mark.thorough)],
)
def test_no_worse_than_policies_of_others(experts, devices, slots):
    rng = random.Random(2)
    for _ in range(3):
        loads = [rng.expovariate(1) for _ in range(experts)]
        placed = tritium.plan_placement(loads, devices, slots)
        assert largest(loads, placed) <= largest(loads, by_copies(loads, devices, slots)) * (1 + 1e-9)
        current = linear(experts, devices)
        for swaps in (1, 3):
            nearby = tritium.plan_placement(loads, devices, experts // devices, current, 2 * swaps)
            assert moved(current, nearby) <= 2 * swaps
            assert largest(loads, nearby) <= largest(loads, by_swaps(loads, current, swaps)) * (1 + 1e-9)


def test_balance_of_64_experts():
    """The mean of the largest by the mean load: 1.55 in order, 1.01 here."""
    rng = random.Random(1)
    before, after = [], []
    for _ in range(5):
        loads = [rng.expovariate(1) for _ in range(64)]
        mean = sum(loads) / 8
        before.append(largest(loads, linear(64, 8)) / mean)
        after.append(largest(loads, tritium.plan_placement(loads, 8, 8)) / mean)
    assert sum(before) / 5 > 1.3
    assert sum(after) / 5 < 1.03


def test_balanced_loads_move_nothing():
    current = ((0, 3), (1, 2))
    assert tritium.plan_placement([1, 1, 1, 1], 2, 2, current) == current
    assert tritium.plan_placement([0, 0, 0, 0], 2, 3, current) == current


def test_the_names_of_experts_change_nothing():
    loads, order = [9.0, 1.0, 4.0, 2.0], [2, 0, 3, 1]
    renamed = [loads[expert] for expert in order]
    for slots in (2, 3):
        first, second = (tritium.plan_placement(one, 2, slots) for one in (loads, renamed))
        assert largest(loads, first) == largest(renamed, second)


def test_loads_may_be_a_tensor():
    assert tritium.plan_placement(torch.tensor([6, 1, 1, 4]), 2, 2) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2, 2), "one for each expert"),
        (([1.0, float("nan")], 2, 2), "numbers from 0"),
        (([1, -1], 2, 2), "numbers from 0"),
        (([1, 2, 3], 2, 1), "give 2 slots"),
        (([1, 2], 0, 1), "devices must be"),
        (([1, 2], 2, 1.5), "slots must be"),
        (([1, 2], 2, 1, [[0]]), "each of 2 experts on 2 devices"),
        (([1, 2], 2, 1, [[0], [0]]), "each of 2 experts"),
        (([1, 2], 2, 1, [[0, 1], [1]]), "at most 1 different"),
        (([1, 2], 2, 1, None, 3), "give both"),
        (([1, 2], 2, 1, [[0], [1]], -1), "number from 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        tritium.plan_placement(*arguments)
