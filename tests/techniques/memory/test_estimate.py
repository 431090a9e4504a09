"""Estimates on fake tensors against real runs, and the fit over sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from support.small_models import flux, flux_inputs
from tritium import compat
from tritium.techniques.memory.estimate import Peaks, estimate


def test_operations_of_blocks_are_those_of_a_real_run():
    model, inputs = flux(2, 3), flux_inputs()
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    # A compiled call in the slot of a block does not run.
    blocks[0].__dict__[compat.modules.COMPILED_CALL] = None
    found = estimate(model, (), inputs, blocks)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = counter.get_flop_counts()
    real = [
        counts[f"FluxTransformer2DModel.{name}"] for name in ("transformer_blocks.1", "single_transformer_blocks.0")
    ]
    # The counter has no formula for the CPU's attention.
    attention = [found.of_blocks[place] - sum(one.values()) for place, one in zip((1, 2), real, strict=True)]
    assert attention == [2 * 2 * 2 * 24 * 24 * 16] * 2
    assert found.of_blocks[0] == found.of_blocks[1]
    assert found.flops >= sum(found.of_blocks)


def test_weights_are_no_activations():
    small = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    x = torch.zeros(2, 64)
    assert estimate(small, (x,), {}, []).peak <= 2 * x.nbytes < small[0].weight.nbytes


@given(st.integers(0, 10**9), st.integers(0, 10**5), st.sets(st.integers(1, 10**5), min_size=2, max_size=4))
def test_the_fit_over_two_sizes_is_a_line(constant, slope, sizes):
    peaks = Peaks()
    for size in sizes:
        peaks.add(size, constant + slope * size)
    assert peaks.at(2 * max(sizes)) == pytest.approx(constant + slope * 2 * max(sizes), rel=1e-6, abs=1)


def test_one_size_is_not_extrapolated():
    # One point gave 183 GiB for 30: the constant would grow with the pixels.
    peaks = Peaks()
    peaks.add(1000, 30)
    assert (peaks.at(1000), peaks.at(2000), peaks.line) == (30, None, None)
    peaks.add(2000, 20)
    assert peaks.at(3000) == 30
