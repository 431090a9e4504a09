"""The rule that turns the costs of a site into a provider."""

import pytest

from tritium.tuning import Key, Verdict
from tritium.tuning.verdict import LAUNCH_US, Cost, Site

KEY = Key("residual_norm_modulate", "tokens=4096 width=3072 norm=layer", "bfloat16")


def site(inductor, triton, **noise):
    return Site({"inductor": Cost(*inductor), "triton": Cost(*triton)}, **noise)


class TestRule:
    """Each case: microseconds of device and host with Inductor's code, and with an owned kernel."""

    @pytest.mark.parametrize(
        ("inductor", "triton", "chosen", "replayed"),
        [
            # Better in one time and not worse in the other: safe wherever a graph waits.
            ((42.6, 5.2), (27.9, 5.2), "triton", "triton"),
            ((42.6, 36.4), (27.9, 5.3), "triton", "triton"),
            # 60 us of host for 14.7 us of device: a graph that waits for its host would be slower.
            ((42.6, 5.2), (27.9, 60.0), "inductor", "triton"),
            # A kernel shorter than its launch: nothing that a caller waits for becomes shorter, unless it is replayed.
            ((4.0, 5.2), (3.3, 5.3), "inductor", "triton"),
            ((6.2, 5.2), (4.0, 5.3), "triton", "triton"),
            # Launches saved where they are what is waited for, the device's time being equal.
            ((2.5, 36.4), (2.5, 5.3), "triton", "inductor"),
            # Less than 3 % of the region.
            ((100.0, 5.2), (97.5, 5.2), "inductor", "inductor"),
            ((100.0, 5.2), (96.9, 5.2), "triton", "triton"),
            # Slower on the device by more than the host gains.
            ((20.0, 36.4), (45.0, 5.3), "inductor", "inductor"),
            ((20.0, 36.4), (30.0, 5.3), "triton", "inductor"),
            ((20.0, 36.4), (31.0, 5.3), "inductor", "inductor"),
            # The host pays at most a third of what the device saves.
            ((200.0, 10.0), (170.0, 19.9), "triton", "triton"),
            ((200.0, 10.0), (170.0, 20.3), "inductor", "triton"),
        ],
    )
    def test_both_times_decide(self, inductor, triton, chosen, replayed):
        assert site(inductor, triton, host_noise_us=0.2).choose() == chosen
        assert site(inductor, triton, host_noise_us=0.2).replayed().choose() == replayed

    def test_noise_is_no_gain_and_no_loss(self):
        assert site((10.0, 5.2), (9.0, 5.2), device_noise_us=1.1).choose() == "inductor"
        assert site((10.0, 30.0), (11.0, 5.2), device_noise_us=1.1).choose() == "triton"
        assert site((40.0, 5.2), (39.0, 6.2), host_noise_us=1.1).choose() == "inductor"

    def test_the_shortest_wait_of_several(self):
        costs = {"inductor": Cost(10.0, 5.2), "triton": Cost(8.0, 5.2), "aten": Cost(6.0, 5.2), "slow": Cost(20.0, 5.2)}
        assert Site(costs).choose() == "aten"
        assert Site(costs).among(["triton", "slow"]).choose() == "triton"
        assert Site(costs).among([]).choose() == "inductor"


def row(owned=0.0436, alone=27.9, **fields):
    times = {"inductor": 0.0583, "triton": owned}
    alone_us = {"inductor": 39.9, "triton": alone} if alone else {}
    return Verdict(KEY, "inductor", times, alone_us=alone_us, **fields)


class TestRows:
    def test_a_site_is_the_block_without_its_neighbours(self):
        costs = row().site().costs
        assert costs["triton"].device_us == pytest.approx(27.9)
        # What Inductor's code takes in the block, which is not what it takes alone.
        assert costs["inductor"].device_us == pytest.approx(27.9 + 58.3 - 43.6)

    @pytest.mark.parametrize(
        ("owned", "alone", "chosen"),
        [
            (0.5, 1000.0, "triton"),
            # Of a block of 1 ms the op takes a tenth: 3 % of that would be noise, 1 % of the block is not.
            (0.98, 80.0, "triton"),
            (0.9901, 90.0, "inductor"),
            (1.0, 1000.0, "inductor"),
            (1.5, 10.0, "inductor"),
            # Nothing is known about the op alone: the margin is of the block.
            (0.98, None, "inductor"),
            (0.96, None, "triton"),
        ],
    )
    def test_a_narrow_gain_in_a_long_block(self, owned, alone, chosen):
        times = {"inductor": 1.0, "triton": owned}
        alone_us = {} if alone is None else {"inductor": 100.0, "triton": alone}
        assert Verdict(KEY, "inductor", times, alone_us=alone_us).site().choose() == chosen

    def test_times_that_contradict_each_other_leave_positive_costs(self):
        odd = Verdict(KEY, "inductor", {"inductor": 0.01, "triton": 0.03}, alone_us={"inductor": 5.0, "triton": 5.0})
        assert all(cost.device_us > 0 for cost in odd.site().costs.values())
        assert odd.site().choose() == "inductor"

    def test_a_measured_host_decides(self):
        assert row(issue_us={"inductor": 125.0, "triton": 125.4}).site().choose() == "triton"
        # It comes before launches.
        slow = row(issue_us={"inductor": 125.0, "triton": 170.4}, launches=launches(1))
        assert slow.site().choose() == "inductor"
        assert slow.site(replayed=True).choose() == "triton"
        assert "host +45.4 us, measured" in slow.why()

    def test_launches_stand_for_a_host_that_was_not_measured(self):
        assert row(launches=launches(1)).site().choose() == "triton"
        # Two launches more, 10.7 us, for 14.7 us of the device; then for 38.3.
        assert row(launches=launches(3)).site().choose() == "inductor"
        assert row(owned=0.0200, alone=9.0, launches=launches(3)).site().choose() == "triton"
        extra = 3 * LAUNCH_US["owned"] - LAUNCH_US["generated"]
        assert f"host {extra:+.1f} us, from launches" in row(launches=launches(3)).why()


def launches(owned):
    return {"inductor": {"generated": 1, "library": 2}, "triton": {"owned": owned, "library": 2}}
