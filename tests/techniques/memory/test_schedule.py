"""The planner against brute force, and the simulated timeline."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium.techniques.memory.schedule import SLOTS, Block, choose, simulate, size_of

KINDS = st.lists(
    st.builds(Block, st.integers(1, 40), st.floats(0.1, 10, allow_subnormal=False)), min_size=1, max_size=3
)


@st.composite
def models(draw, most=7):
    """Blocks of a few kinds, as denoisers have."""
    return tuple(draw(st.lists(st.sampled_from(draw(KINDS)), min_size=1, max_size=most)))


def best_of_all(blocks, space, rate):
    """Return the shortest step of all subsets and numbers of slots that fit, or None."""
    sets = [kept for count in range(len(blocks) + 1) for kept in itertools.combinations(range(len(blocks)), count)]
    steps = [
        simulate(blocks, kept, slots, rate) for kept in sets for slots in SLOTS if size_of(blocks, kept, slots) <= space
    ]
    return min(steps, default=None)


@settings(max_examples=50)
@given(models(), st.integers(1, 300), st.floats(0.5, 30))
def test_few_blocks_get_the_best_of_all_subsets(blocks, space, rate):
    best, found = best_of_all(blocks, space, rate), choose(blocks, space, rate)
    assert (best is None) == (found is None)
    if found is not None:
        assert found.size <= space
        assert found.step_ms == pytest.approx(best)


def test_the_search_is_within_two_percent_of_the_best():
    # More blocks than all subsets are tried for.
    random = Random(7)
    for _ in range(40):
        kinds = [Block(random.randint(1, 40), random.uniform(0.1, 10)) for _ in range(random.randint(1, 4))]
        blocks = [random.choice(kinds) for _ in range(random.randint(9, 11))]
        space, rate = random.randint(1, sum(block.size for block in blocks)), random.uniform(0.5, 30)
        best, found = best_of_all(blocks, space, rate), choose(blocks, space, rate)
        assert (best is None) == (found is None)
        if found is not None:
            assert found.size <= space
            assert best <= found.step_ms * (1 + 1e-9) <= best * 1.02


@settings(max_examples=50)
@given(models(), st.integers(1, 300), st.integers(0, 100), st.floats(0.5, 30))
def test_a_larger_budget_is_never_slower(blocks, space, more, rate):
    small, large = choose(blocks, space, rate), choose(blocks, space + more, rate)
    if small is not None:
        assert large.step_ms <= small.step_ms * (1 + 1e-9)


@settings(max_examples=100)
@given(models(12), st.sets(st.integers(0, 11)), st.sampled_from(SLOTS), st.floats(0.5, 30))
def test_a_step_takes_at_least_its_work_and_its_copies(blocks, resident, slots, rate):
    resident = {place for place in resident if place < len(blocks)}
    step = simulate(blocks, resident, slots, rate)
    streamed = [block for place, block in enumerate(blocks) if place not in resident]
    assert step >= sum(block.ms for block in blocks) - 1e-6
    if len(streamed) >= 2 * slots:
        # Each slot has several blocks, so all of them are copied in every step.
        assert step >= sum(block.size for block in streamed) / rate - 1e-6


@pytest.mark.parametrize(("rate", "step"), [(20.0, 60.0), (10.0, 60.0), (5.0, 120.0), (1.0, 600.0)])
def test_equal_blocks_wait_only_for_the_slower_of_both(rate, step):
    # Six blocks of 100 bytes and 10 ms: copies take 5, 10, 20 and 100 ms each.
    assert simulate([Block(100, 10.0)] * 6, (), 3, rate) == pytest.approx(step)


def test_a_block_with_a_slot_to_itself_is_copied_once():
    assert simulate([Block(100, 1.0)] * 2, (), 2, 0.001) == pytest.approx(2.0)
    assert choose([Block(100, 1.0)] * 3, 200, 10.0).size == 200
    assert choose([Block(100, 1.0)] * 3, 199, 10.0) is None


def test_flux_on_a_fast_link_needs_three_quarters_resident():
    blocks = [Block(680_000_000, 3.2)] * 19 + [Block(283_000_000, 1.6)] * 38
    found = choose(blocks, 22_000_000_000, 50e6)
    assert found.needed_share == pytest.approx(0.74, abs=0.01)
    assert found.step_ms == pytest.approx(found.compute_ms)
