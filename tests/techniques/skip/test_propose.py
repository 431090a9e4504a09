"""Proposals from recordings: errors by inner products, windows, the programme over segments, and derived branches."""

import itertools

import pytest
import torch

from tritium import Skip
from tritium.techniques.skip.propose import Proposer, Recording, falling, interpolated, single, weights_of


def recording_of(function, steps=12, branches=1, images=1):
    outputs = torch.stack(
        [
            torch.stack([torch.tensor(function(step, branch, image), dtype=torch.float64) for step in range(steps)])
            for image in range(images)
            for branch in range(branches)
        ]
    ).view(images, branches * steps, -1)
    products = outputs @ outputs.transpose(1, 2)
    return Recording(
        products.view(images, branches, steps, branches, steps), tuple(1 - step / steps for step in range(steps))
    )


def curve(step, branch, image):
    return [1.0 + 0.1 * branch, 2.0 ** (-step / 3) + image, 0.3 * step]


class TestCost:
    def test_lines_cost_nothing(self):
        recording = recording_of(lambda step, *_: [1.0 + step, 3.0 - 2 * step])
        proposer = Proposer(recording, (1.0,) * 12)
        assert proposer.cost(Skip("RR(11R)")) == pytest.approx(0, abs=1e-6)
        assert proposer.cost(Skip("RR(00R)")) > 0.1

    def test_it_is_the_error_of_each_forecast(self):
        recording, sensitivity = recording_of(curve), falling(12)
        values = [torch.tensor(curve(step, 0, 0), dtype=torch.float64) for step in range(12)]
        error = (values[3] + (values[3] - values[1]) / 2 * 1 - values[4]).norm() / values[4].norm()
        row = "RRRR1RRRRRRR".replace("RRRR1", "RR1R1")
        first = (2 * values[1] - values[0] - values[2]).norm() / values[2].norm()
        expected = sensitivity[2] * first + sensitivity[4] * error
        assert Proposer(recording, sensitivity).cost(Skip(row)) == pytest.approx(expected.item(), rel=1e-6)

    def test_derived_branches(self):
        steady = recording_of(lambda step, branch, _: [step + 5.0 * branch, 1.0], branches=2)
        assert Proposer(steady, (1.0,) * 12).cost(Skip(("R" * 12, "RR" + "D" * 10))) == pytest.approx(0, abs=1e-6)
        moving = recording_of(lambda step, branch, _: [step + 5.0 * branch * step, 1.0], branches=2)
        assert Proposer(moving, (1.0,) * 12).cost(Skip(("R" * 12, "RR" + "D" * 10))) > 0.1

    @pytest.mark.parametrize("xs", [[0, 1, 2], [3, 5, 9], [1.0, 0.7, 0.1]])
    def test_weights_continue_polynomials(self, xs):
        weights = weights_of(xs, 11)
        for power in range(3):
            assert sum(w * x**power for w, x in zip(weights, xs, strict=True)) == pytest.approx(11**power)


class TestProposals:
    @pytest.mark.parametrize("runs", [5, 7, 9, 11])
    def test_they_have_the_runs_and_both_orders(self, runs):
        found = Proposer(recording_of(curve), falling(12)).proposals(runs, 8)
        assert len(found) == len(set(found)) <= 8
        assert all(skip.actions()[0].count("R") == runs for skip in found)
        assert {skip.largest_order for skip in found} == {1, 2}

    def test_the_programme_is_exact(self):
        """Against all ways to place the computed steps."""
        proposer = Proposer(recording_of(curve, steps=9), falling(9))
        for runs in (4, 5, 6):
            best = min((cost_of(proposer, rest), rest) for rest in itertools.combinations(range(3, 9), runs - 3))
            assert proposer._shortest(runs, 3) == frozenset((0, 1, 2, *best[1]))

    def test_an_early_error_counts_more(self):
        flat = Proposer(recording_of(curve), (1.0,) * 12)
        weighted = Proposer(recording_of(curve), tuple(100.0**-step for step in range(12)))
        assert sum(weighted._shortest(6, 3)) <= sum(flat._shortest(6, 3))

    def test_derived_tables_are_the_cheapest_first(self):
        proposer = Proposer(recording_of(curve, branches=2), falling(12))
        found = proposer.derived(Skip("RRR1R1R1R1RR"))
        costs = [skip.cost(branches=2) for skip in found]
        assert costs == sorted(costs)
        assert all(skip.rows[0] == "RRR1R1R1R1RR" for skip in found)
        assert proposer.derived(Skip(("RRR1R1R1R1RR", "RRR1R1R1D1DD"))) == []
        assert Proposer(recording_of(curve), falling(12)).derived(Skip("RRR1R1R1R1RR")) == []


def cost_of(proposer, rest):
    computed = [0, 1, 2, *rest, 9]
    pairs = zip(computed[1:], computed[2:], computed, strict=False)
    return sum(proposer._segment(before, last, end) for last, end, before in pairs if last >= 2)


class TestSensitivity:
    def test_interpolation_is_geometric(self):
        found = interpolated({2: 0.16, 6: 0.01}, 8)
        assert found[0] == found[2] == pytest.approx(0.16)
        assert found[4] == pytest.approx(0.04)
        assert found[7] == pytest.approx(0.01)

    def test_the_typical_one_falls_fifteen_fold(self):
        found = falling(28)
        assert found[0] / found[-1] == pytest.approx(15)
        assert list(found) == sorted(found, reverse=True)

    def test_one_step_alone(self):
        assert single(5, 3).rows == ("RRR1R",)
