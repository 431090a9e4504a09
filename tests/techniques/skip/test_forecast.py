"""Known functions of the step are continued exactly, from computed outputs alone."""

import pytest
import torch

from support.denoising import Known, euler, generate, optimized
from tritium import Skip
from tritium.techniques.skip.history import History, Structure, extrapolated


def outputs_of(model, skip, **fields):
    outputs = []
    with optimized(model, skip, model.scheduler):
        generate(model, model.scheduler, outputs=outputs, **fields)
    return [output.flatten()[0].item() for output in outputs]


class TestExact:
    @pytest.mark.parametrize(
        ("order", "function"),
        [
            (0, lambda step, _: 7.0),
            (1, lambda step, _: 3.0 * step - 2),
            (2, lambda step, _: 2.0 * step * step - 3 * step + 1),
            (2, lambda step, _: 3.0 * step - 2),
            (1, lambda step, _: 7.0),
        ],
        ids=["constant", "linear", "quadratic", "linear by 2", "constant by 1"],
    )
    @pytest.mark.parametrize("row", ["RRRkRkRkRk", "RRRkkkRkkR", "RRRkRRkkkk"])
    def test_polynomials_over_the_index(self, order, function, row):
        model = Known(euler(), function)
        row = row.replace("k", str(order))
        assert outputs_of(model, Skip(row), steps=10) == [function(step, 0.0) for step in range(10)]
        assert model.ran == [step for step, letter in enumerate(row) if letter == "R"]

    @pytest.mark.parametrize("shift", [1.0, 3.0])
    def test_a_line_over_sigma(self, shift):
        scheduler = euler(shift=shift)
        model = Known(scheduler, lambda step, _: 4.0 * scheduler.sigmas[step].item() + 1)
        found = outputs_of(model, Skip("RR1R11R1", over="sigma"))
        expected = [4.0 * sigma.item() + 1 for sigma in scheduler.sigmas[:-1]]
        assert found == pytest.approx(expected, abs=1e-6)
        by_index = outputs_of(model, Skip("RR1R11R1"))
        assert (by_index == pytest.approx(expected, abs=1e-3)) == (shift == 1.0)

    def test_only_computed_outputs_are_continued(self):
        """A function without a pattern shows which calls a forecast comes from."""
        values = [1.0, 5.0, -2.0, 11.0, 3.0, 8.0, -7.0, 2.0]
        model = Known(euler(), lambda step, _: values[step])
        found = outputs_of(model, Skip("RR11R0R1"))
        line = [values[1] + (values[1] - values[0]) * gap for gap in (1, 2)]
        last = values[6] + (values[6] - values[4]) / 2
        assert found == [1.0, 5.0, *line, 3.0, 3.0, -7.0, last]

    def test_every_branch_has_its_own_history(self):
        model = Known(euler(), lambda step, condition: step * (1 + condition))
        found = outputs_of(model, Skip("RR1R11R1"), guidance=(0.0, 9.0))
        assert found == [step * (1 + condition) for step in range(8) for condition in (0.0, 9.0)]

    def test_derived_outputs_differ_by_the_kept_difference(self):
        model = Known(euler(), lambda step, condition: step + (10.0 + step) * condition)
        found = outputs_of(model, Skip(("RRRRRRRR", "RRDDRDRD")), guidance=(0.0, 1.0))
        # The difference is that of the last step in which both ran: 11 in step 1, 14 in step 4, 16 in step 6.
        differences = [10, 11, 11, 11, 14, 14, 16, 16]
        assert found[1::2] == [step + difference for step, difference in enumerate(differences)]
        assert model.ran.count(2) == 1

    def test_derived_outputs_enter_no_history(self):
        model = Known(euler(), lambda step, condition: step + 100.0 * condition * step * step)
        found = outputs_of(model, Skip(("RRRRRRRR", "RRDR1DRR")), guidance=(0.0, 1.0))
        line = 301 * 3 + (301 * 3 - 101) / 2
        assert found[9] == line


class TestHistory:
    def test_bfloat16_is_continued_in_float32(self):
        values = [torch.tensor([value], dtype=torch.bfloat16) for value in (100.0, 100.5, 101.5)]
        history = History(3)
        for step, value in enumerate(values):
            history.add(Structure((value,)), step)
        (found,) = history.forecast(2, 4, float)
        assert found.dtype == torch.bfloat16
        # 100, 100.5, 101.5 have second differences of 0.5: step 4 is 105.
        assert found.item() == torch.tensor(105.0, dtype=torch.bfloat16).item()

    def test_float16_stays_finite(self):
        history = History(3)
        for step, value in enumerate((0.0, 20000.0, 60000.0)):
            history.add(Structure((torch.tensor([value], dtype=torch.float16),)), step)
        (found,) = history.forecast(2, 5, float)
        assert found.item() == torch.finfo(torch.float16).max

    @pytest.mark.parametrize("order", [0, 1, 2])
    def test_results_and_buffers_share_no_memory(self, order):
        history = History(order + 1)
        given = [torch.full((2,), float(step)) for step in range(order + 1)]
        for step, tensor in enumerate(given):
            history.add(Structure({"sample": tensor, "none": None}), step)
            tensor.fill_(-1)
        first = history.forecast(order, order, float)
        assert first["sample"].tolist() == [order] * 2
        assert first["none"] is None
        first["sample"].fill_(99)
        assert history.forecast(order, order, float)["sample"].tolist() == [order] * 2

    def test_buffers_written_in_inference_mode_serve_other_modes(self):
        history = History(1)
        with torch.inference_mode():
            history.add(Structure((torch.ones(2),)), 0)
        history.add(Structure((torch.full((2,), 2.0),)), 1)
        assert history.forecast(0, 2, float)[0].tolist() == [2.0, 2.0]

    def test_polynomials_against_their_formula(self):
        xs, x = [0.9, 0.7, 0.2], 0.05
        values = [torch.tensor(3 * v * v - v + 2, dtype=torch.float64) for v in xs]
        assert extrapolated(values, xs, x).item() == pytest.approx(3 * x * x - x + 2)
