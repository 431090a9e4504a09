"""What measurements decide: rotations, scales, and which layers move to a more accurate format first."""

import pytest
import torch

from support import small_pipelines
from tritium import Quantize
from tritium.techniques.quantize.calibrating import GAIN, SHARES, ladder, with_measured
from tritium.techniques.quantize.selection import candidates
from tritium.techniques.quantize.sensitivity import Observation, Sensitivity


@pytest.fixture(scope="module")
def model():
    return small_pipelines.flux(2, 2).transformer


def errors_of(model, ratios, config=None, largest=None):
    """Measurements in which every layer has the same ratios, but for some."""
    config = config or Quantize("int8")
    found = {}
    for name in candidates(model, config):
        columns = model.get_submodule(name).in_features
        seen = Observation(signal=torch.tensor(1.0))
        for format_, ratio in {**ratios[None], **ratios.get(name, {})}.items():
            seen.precisions[format_] = config.precision(format_, columns)
            seen.noise[format_] = torch.tensor(10 ** (-ratio / 10), dtype=torch.float64)
        seen.largest = {(0, step): torch.tensor(value) for step, value in enumerate(largest or [])}
        rotate = seen.precisions["int8-rotated"].rotate
        seen.largest |= {(rotate, step): torch.tensor(2 * value) for step, value in enumerate(largest or [])}
        found[name] = seen
    return Sensitivity(found)


EVEN = {None: {"fp8": 28.0, "int8": 38.0, "int8-rotated": 38.0}}
Q = "transformer_blocks.0.attn.to_q"


def formats(config):
    return {name: format_ for name, format_, _ in config.measured}


def test_layers_that_gain_are_rotated(model):
    ratios = {**EVEN, Q: {"int8-rotated": 38.1 + GAIN}, "transformer_blocks.0.attn.to_k": {"int8-rotated": 37.9 + GAIN}}
    found = formats(with_measured(Quantize("int8"), model, errors_of(model, ratios)))
    assert found.pop(Q) == "int8-rotated"
    assert set(found.values()) == {"int8"}


def test_a_rotation_that_is_named_is_kept(model):
    errors = errors_of(model, EVEN, Quantize("int8", rotate=16))
    found = formats(with_measured(Quantize("int8", rotate=16), model, errors))
    assert set(found.values()) == {"int8-rotated"}
    found = formats(
        with_measured(Quantize("int8", rotate=False), model, errors_of(model, {**EVEN, Q: {"int8-rotated": 60.0}}))
    )
    assert set(found.values()) == {"int8"}


def test_static_scales_cover_all_steps(model):
    errors = errors_of(model, EVEN, largest=[2.0, 5.0, 3.0])
    (scales,) = {scales for *_, scales in with_measured(Quantize("int8", scales="static"), model, errors).measured}
    assert scales == pytest.approx((5 / 127,))
    # float8 has a factor of 2 to spare, in powers of two: 10 / 448 is below 2**-5.
    (scales,) = {scales for *_, scales in with_measured(Quantize("fp8", scales="static"), model, errors).measured}
    assert scales == (2.0**-5,)


def test_scales_by_step_are_those_of_their_step(model):
    errors = errors_of(model, EVEN, largest=[2.0, 5.0, 3.0])
    config = with_measured(Quantize("int8", scales="step"), model, errors)
    (scales,) = {scales for *_, scales in config.measured}
    assert scales == pytest.approx((2 / 127, 5 / 127, 3 / 127))
    # The largest of a rotated input is another.
    rotated = with_measured(Quantize("int8-rotated", scales="step"), model, errors)
    (scales,) = {scales for *_, scales in rotated.measured}
    assert scales == pytest.approx((4 / 127, 10 / 127, 6 / 127))


def test_scales_by_row_are_not_stored(model):
    errors = errors_of(model, EVEN, largest=[2.0])
    assert {scales for *_, scales in with_measured(Quantize("int8"), model, errors).measured} == {()}


class TestLadder:
    def steps(self, model, base, config=None, ratios=None):
        config = config or Quantize("auto")
        return [formats(step) for step in ladder(config, model, errors_of(model, ratios or EVEN), base)]

    def test_the_first_has_one_format(self, model):
        assert set(self.steps(model, "fp8")[0].values()) == {"fp8"}
        assert set(self.steps(model, "int8")[0].values()) == {"int8"}

    @pytest.mark.parametrize(("base", "better"), [("fp8", "int8"), ("int8", None)])
    def test_the_worst_layers_move_first(self, model, base, better):
        steps = self.steps(model, base, ratios={**EVEN, Q: {base: 20.0, "int8-rotated": 20.0}})
        assert steps[1][Q] == better
        moved = [sum(format_ == better for format_ in step.values()) for step in steps]
        assert moved == sorted(moved)
        assert moved[0] == 0
        assert moved[-1] == len(steps[0]) / 2
        assert len(steps) == len(SHARES)

    def test_named_layers_stay_out_of_it(self, model):
        config = Quantize("auto", layers={"transformer_blocks.0": None})
        assert not any(name.startswith("transformer_blocks.0.") for name in self.steps(model, "int8", config)[0])
