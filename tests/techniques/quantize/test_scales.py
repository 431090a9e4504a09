"""Static scales of inputs: compiled code uses the measured ones, and those of the current step."""

import pytest
import torch

from support.promised import Compiles
from support.small_pipelines import generate
from tritium import CompilationConfig, Plan, Quantize, Steps, optimize
from tritium.compiler.passes.input_scales import scales_of

CALL = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 16}
PROMPTS = ["a red circle", "a blue square"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    from tritium.pipelines import trial

    monkeypatch.setattr(trial, "SECONDS", 0.1)


@pytest.fixture
def calibrated(pipe, quantized):
    def apply(config):
        handle = quantized(pipe, config)
        return handle, handle.calibrate(PROMPTS, **CALL)["transformer"].config

    return apply


@pytest.mark.filterwarnings("ignore:tritium. quantize makes")
class TestAfterCalibration:
    def test_scales_of_a_layer_are_those_measured(self, pipe, calibrated):
        handle, config = calibrated(Quantize("int8", scales="step", rotate=False))
        entries = {name: scales for name, _, scales in config.measured}
        linear = pipe.transformer.single_transformer_blocks[0].proj_mlp
        known = scales_of(linear.weight)
        assert known.scales.tolist() == pytest.approx(entries["single_transformer_blocks.0.proj_mlp"])
        assert len(set(known.scales.tolist())) == 4
        handle.remove()
        assert scales_of(linear.weight) is None

    def test_the_step_is_written_before_each_call(self, pipe, calibrated):
        calibrated(Quantize("int8", scales="step"))
        linear, seen = pipe.transformer.single_transformer_blocks[0].proj_mlp, []
        step = scales_of(linear.weight).step
        pipe(
            "a red circle",
            output_type="latent",
            callback_on_step_end=lambda pipe, index, time, values: seen.append(int(step)) or values,
            **CALL,
        )
        assert seen == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("steps", "expected"),
        [(8, [0, 0, 1, 1, 2, 2, 3, 3]), pytest.param(2, [0, 2], marks=pytest.mark.thorough)],
    )
    def test_other_numbers_of_steps_use_the_same_share(self, pipe, calibrated, steps, expected):
        calibrated(Quantize("int8", scales="step"))
        linear, seen = pipe.transformer.single_transformer_blocks[0].proj_mlp, []
        step = scales_of(linear.weight).step
        generate(pipe, steps=steps)
        with Compiles() as compiles:
            pipe(
                "a red circle",
                output_type="latent",
                callback_on_step_end=lambda pipe, index, time, values: seen.append(int(step)) or values,
                **{**CALL, "num_inference_steps": steps},
            )
        assert seen == expected
        assert compiles.count == 0, "no step compiles anything"

    def test_another_process_gets_it_from_the_config(self, pipe, calibrated):
        handle, config = calibrated(Quantize("int8", scales="static"))
        image = generate(pipe, steps=4)
        handle.remove()
        plan = Plan(quantize=config, config=CompilationConfig(engine="eager"), progress=False)
        with optimize(pipe, plan):
            assert torch.equal(generate(pipe, steps=4), image)

    def test_other_steps_may_have_scales_by_row(self, pipe, calibrated, quantized):
        handle, config = calibrated(Quantize("int8", scales="static", steps=Steps(first=2, instead="row")))
        assert "first 2 and last 0 steps with scales by row" in str(handle)
        two = generate(pipe, steps=2)
        four = generate(pipe, steps=4)
        handle.remove()
        handle = quantized(
            pipe, Quantize("int8", measured=tuple((name, kind, ()) for name, kind, _ in config.measured))
        )
        assert torch.equal(generate(pipe, steps=2), two)
        assert not torch.equal(generate(pipe, steps=4), four)


def test_before_calibration_every_row_has_its_scale(pipe, quantized):
    handle = quantized(pipe, Quantize("int8", scales="static"))
    image = generate(pipe)
    handle.remove()
    quantized(pipe, Quantize("int8"))
    assert torch.equal(generate(pipe), image)
