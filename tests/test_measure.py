from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from tritium import device, measure


def recording(log, durations):
    """Variants that note their turns, and a stopwatch that gives each the next of its made-up durations."""
    supply = {name: iter(values) for name, values in durations.items()}
    variants = {name: (lambda name=name: log.append(name) or name) for name in durations}

    def stopwatch(run, calls):
        return [next(supply[run()]) for _ in range(calls)]

    return variants, stopwatch


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_every_variant_follows_every_other_equally_often(count):
    log, names = [], "abcdefgh"[:count]
    variants, stopwatch = recording(log, {name: itertools.repeat(1.0) for name in names})
    measure.interleave(variants, "cpu", rounds=measure.cycle(count), warmup=0, stopwatch=stopwatch)
    rounds = [log[start : start + count] for start in range(0, len(log), count)]
    assert all(sorted(order) == list(names) for order in rounds)
    followers = [pair for order in rounds for pair in itertools.pairwise(order)]
    counts = {followers.count(pair) for pair in itertools.permutations(names, 2)}
    assert len(counts) <= 1
    assert counts <= {1, 2}


def test_warm_up_is_not_sampled_and_bursts_are():
    log = []
    variants, stopwatch = recording(log, {"a": itertools.repeat(7.0), "b": itertools.repeat(8.0)})
    timings = measure.interleave(variants, "cpu", rounds=2, warmup=3, burst=3, stopwatch=stopwatch)
    assert log == ["a", "b"] * 3 + ["a"] * 3 + ["b"] * 6 + ["a"] * 3
    assert timings["a"].samples == timings["b"].samples == 6


def test_medians_and_progress():
    shares = []
    variants, stopwatch = recording([], {"slow": [9.0, 30.0, 10.0, 10.0], "fast": [1.0, 2.0, 90.0, 2.0]})
    timings = measure.interleave(variants, "cpu", rounds=4, warmup=0, stopwatch=stopwatch, on_round=shares.append)
    assert (timings["slow"].median_ms, timings["fast"].median_ms) == (10.0, 2.0)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_time_ends_after_every_variant_had_every_place():
    log = []
    variants, stopwatch = recording(log, {name: itertools.repeat(1.0) for name in "abcd"})
    measure.interleave(variants, "cpu", seconds=0.0, warmup=0, stopwatch=stopwatch)
    rounds = [log[start : start + 4] for start in range(0, len(log), 4)]
    assert len(rounds) >= measure.MINIMUM_ROUNDS
    for place in range(4):
        assert len({[turn[place] for turn in rounds].count(name) for name in "abcd"}) == 1


@pytest.mark.parametrize("samples", [[1.0, 2.0], [5.0, 1.0, 4.0], list(range(1, 64)), [3.0, 3.0, 3.0, 8.0]])
def test_quartiles_are_numpys(samples):
    timing = measure.Timing.of(samples)
    expected = np.quantile(samples, [0.25, 0.5, 0.75])
    actual = (timing.lower_quartile_ms, timing.median_ms, timing.upper_quartile_ms)
    np.testing.assert_allclose(actual, expected)


def test_the_middle_leaves_outliers_out_and_does_not_jump():
    assert measure.Timing.of([2.0]) == measure.Timing(2.0, 2.0, 2.0, 1, 2.0)
    assert measure.Timing.of([1.0, 2.0, 3.0, 100.0]).middle_ms == 2.5
    assert measure.Timing.of([5.0, 1.0, 4.0]).middle_ms == pytest.approx(10 / 3)
    # Two clocks, as often each: one sample more of either moves the median from one to the other.
    fast, slow = [1.0] * 50, [1.1] * 50
    timings = [measure.Timing.of(samples) for samples in ([*fast, *slow, 1.0], [*fast, *slow, 1.1])]
    assert [timing.median_ms for timing in timings] == [1.0, 1.1]
    assert timings[0].middle_ms == pytest.approx(timings[1].middle_ms, rel=0.003)


def test_requests_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="empty"):
        measure.interleave({}, "cpu", rounds=1)
    for both in ({}, {"seconds": 1.0, "rounds": 1}):
        with pytest.raises(ValueError, match="either seconds or rounds"):
            measure.interleave({"a": int}, "cpu", **both)
    with pytest.raises(ValueError, match="no samples"):
        measure.Timing.of([])


def test_the_host_clock_times_every_call():
    calls = []
    taken = measure.stopwatch_for("cpu")(lambda: calls.append(time.sleep(0.002)), 3)
    assert len(calls) == len(taken) == 3
    assert min(taken) >= 2
    assert measure.first_call(lambda: calls.append(time.sleep(0.002)), "cpu") >= 0.002
    assert len(calls) == 4


@pytest.mark.skipif(not device.forget_peak_memory(), reason="this system does not count it")
def test_peak_memory_on_a_cpu_is_that_of_the_call(monkeypatch):
    little = measure.peak_memory(lambda: None, "cpu")
    much = measure.peak_memory(lambda: torch.ones(2**26), "cpu")
    assert 2**27 < much - little < 2**29
    assert measure.peak_memory(lambda: None, "cpu") < much - 2**27
    monkeypatch.setattr(device, "forget_peak_memory", lambda: False)
    assert measure.peak_memory(lambda: pytest.fail("must not be run for nothing"), "cpu") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 60, 63, 128])
def test_relative_l2_is_numpys_in_float64(dtype, size):
    generator = torch.Generator().manual_seed(size)
    reference = torch.randn(3, size, generator=generator).to(dtype)
    actual = (reference.float() * (1 + 1e-2 * torch.randn(3, size, generator=generator))).to(dtype)
    wide_reference, wide_actual = reference.double().numpy(), actual.double().numpy()
    expected = np.linalg.norm(wide_actual - wide_reference) / np.linalg.norm(wide_reference)
    assert measure.relative_l2(actual, reference) == pytest.approx(expected, rel=1e-12)


def test_relative_l2_of_extreme_values_and_other_shapes():
    zero = torch.zeros(3)
    large = torch.full((1000,), 6e4, dtype=torch.float16)
    assert measure.relative_l2(large * 0.5, large) == pytest.approx(0.5, rel=1e-12)
    assert measure.relative_l2(zero, zero) == 0.0
    assert measure.relative_l2(torch.ones(3), zero) == float("inf")
    assert np.isnan(measure.relative_l2(torch.tensor([float("nan")]), torch.ones(1)))
    with pytest.raises(ValueError, match="shapes differ"):
        measure.relative_l2(torch.ones(3), torch.ones(1))


def test_load_tells_others_from_ourselves(monkeypatch):
    # Ten seconds in which all processes together took 17 core-seconds, this one 12 of them.
    clocks = {"perf_counter": iter([0.0, 10.0]), "process_time": iter([3.0, 15.0])}
    for name, values in clocks.items():
        monkeypatch.setattr(measure.time, name, lambda values=values: next(values))
    busy = iter([100.0, 117.0])
    monkeypatch.setattr(device, "busy_cpu_seconds", lambda: next(busy))
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    load = measure.LoadMeter().read()
    monkeypatch.setattr(device, "busy_cpu_seconds", lambda: None)
    for name in clocks:
        monkeypatch.setattr(measure.time, name, lambda: 0.0)
    assert measure.LoadMeter().read() is None
    monkeypatch.undo()
    assert load == measure.Load(own_cores=1.2, foreign_cores=0.5, usable_cores=2)


@pytest.mark.parametrize(
    ("load", "disturbed"),
    [
        (measure.Load(1.0, 1.0, 2), True),
        (measure.Load(1.99, 0.02, 2), False),
        (measure.Load(4.0, 3.0, 64), False),
        (measure.Load(32.0, 30.0, 64), True),
    ],
)
def test_foreign_load_disturbs_only_where_cores_are_short(load, disturbed):
    assert load.disturbed is disturbed


@pytest.mark.gpu
def test_device_events_see_the_work_of_the_device():
    small, large = (torch.randn(size, size, device="cuda") for size in (64, 4096))
    timings = measure.interleave({"small": lambda: small @ small, "large": lambda: large @ large}, "cuda", rounds=10)
    assert timings["large"].median_ms > timings["small"].median_ms
    assert measure.peak_memory(lambda: torch.empty(2**20, device="cuda"), "cuda") >= 2**22


def test_roofs_are_rates():
    roofs = measure.roofs("cpu", torch.float32, runs=1)
    assert 1e8 < roofs.bytes_per_s < 1e13
    assert 1e8 < roofs.flops_per_s < 1e15
    assert roofs.dtype == "float32"
