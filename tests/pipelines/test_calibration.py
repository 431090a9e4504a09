"""Choose formats for a pipeline on its own images, within a budget, and only what is faster."""

import warnings

import pytest
import torch

from support import small_pipelines
from support.small_pipelines import generate
from support.states import equal, snapshot
from tritium import Budget, Choice, CompilationConfig, Plan, Quantize, optimize
from tritium.errors import ConfigError, PipelineError
from tritium.pipelines import trial
from tritium.techniques.quantize import calibrating

CALL = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
PROMPTS = ["a red circle", "a blue square above a red circle"]


@pytest.fixture
def pipe():
    return small_pipelines.flux(1, 2)


@pytest.fixture
def handle_of(pipe):
    handles = []

    def apply(quantize, **plan):
        plan = {"config": CompilationConfig(engine="eager"), "components": {"vae": "eager"}, "progress": False, **plan}
        handles.append(optimize(pipe, Plan(quantize=quantize, **plan)))
        return handles[-1]

    yield apply
    for handle in handles:
        handle.remove()


@pytest.fixture
def takes(monkeypatch):
    """Let quantized calls take a share of the time of unquantized ones."""

    def set_share(share):
        def timed(part, choices, calls, seconds=0):
            assert calls
            return {choice: 10.0 * (share if choice.configs().get("quantize") else 1) for choice in choices}

        monkeypatch.setattr(trial, "timed", timed)

    # On any machine the search has int8.
    monkeypatch.setattr(calibrating, "bases", lambda module: ["int8"])
    return set_share


def precisions(handle):
    component = next(entry for entry in handle.components if entry.name == "transformer")
    return {name: layer["precision"] for name, layer in component.techniques["quantize"]["layers"].items()}


class TestSensitivity:
    def test_every_linear_of_blocks_in_every_format(self, pipe, handle_of):
        handle = handle_of(False)
        before, image = snapshot(pipe.transformer), generate(pipe)
        found = handle.sensitivity(PROMPTS, **CALL)["transformer"]
        assert found["transformer_blocks.0.attn.to_q"].keys() == {
            "fp8",
            "int8",
            "int8-rotated",
            "int8-weights",
            "int4-weights",
        }
        assert found["transformer_blocks.0.attn.to_q"]["int8"] > found["transformer_blocks.0.attn.to_q"]["fp8"]
        assert len(found.worst("fp8")) == 5
        assert "fp8" in str(found)
        assert equal(snapshot(pipe.transformer), before)
        assert torch.equal(generate(pipe), image)
        assert handle.choices["transformer"] == Choice(quantize=False) or handle.choices["transformer"] == Choice()

    def test_stored_bytes_are_measured_on_the_originals(self, pipe, handle_of):
        plain = handle_of(False)
        first = plain.sensitivity(PROMPTS, **CALL)["transformer"]
        plain.remove()
        stored = handle_of(Quantize("int8-weights"))
        second = stored.sensitivity(PROMPTS, **CALL)["transformer"]
        name = "single_transformer_blocks.0.proj_mlp"
        assert second[name]["int8"] == pytest.approx(first[name]["int8"], abs=0.2)

    def test_a_bare_model_is_given_calls(self):
        model = torch.nn.Sequential()
        model.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))])
        model.forward = lambda x: model.blocks[0](x)
        with optimize(model, Plan(config=CompilationConfig(engine="eager"), progress=False)) as handle:
            found = handle.sensitivity([{"x": torch.randn(20, 32)}])["model"]
            assert set(found) == {"blocks.0.0", "blocks.0.1"}
            with pytest.raises(ConfigError, match="keyword arguments"):
                handle.sensitivity("a red circle")

    @pytest.mark.parametrize("prompts", [[], None, [3]])
    def test_no_prompts(self, handle_of, prompts):
        with pytest.raises(ConfigError, match="prompts"):
            handle_of(False).sensitivity(prompts, **CALL)

    def test_a_removed_handle(self, handle_of):
        handle = handle_of("int8")
        handle.remove()
        for method in (handle.sensitivity, handle.calibrate):
            with pytest.raises(PipelineError, match="removed"):
                method(PROMPTS, **CALL)


class TestNamed:
    def test_slower_is_kept_with_one_warning(self, handle_of, takes):
        takes(1.25)
        handle = handle_of("int8")
        with pytest.warns(
            RuntimeWarning, match=r"quantize makes transformer 1\.25 times slower.*the plan names it"
        ) as seen:
            found = handle.calibrate(PROMPTS, **CALL)["transformer"]
        assert len([entry for entry in seen if "tritium" in str(entry.message)]) == 1
        assert found.milliseconds == {"quantize": 12.5, "without": 10.0}
        assert "int8" in set(precisions(handle).values()) | {"int8"}
        assert handle.choices["transformer"].configs()["quantize"] == found.config
        assert "12.50 ms a call, unquantized 10.00 ms" in str(handle)

    def test_faster_has_no_warning(self, handle_of, takes):
        takes(0.5)
        handle = handle_of("int8")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            found = handle.calibrate(PROMPTS, **CALL)["transformer"]
        assert len(found.differences) == len(PROMPTS)
        assert found.psnr > 30

    def test_nothing_to_measure(self, handle_of):
        with pytest.raises(ConfigError, match="nothing to calibrate"):
            handle_of("fp8").calibrate(PROMPTS, **CALL)


class TestAuto:
    def test_it_waits_for_prompts(self, pipe, handle_of):
        plain = generate(pipe)
        handle = handle_of("auto")
        torch.testing.assert_close(generate(pipe), plain, rtol=1e-5, atol=1e-5)
        assert "linear='auto' waits for handle.calibrate(prompts)" in str(handle)

    def test_the_cheapest_within_a_wide_budget(self, pipe, handle_of, takes):
        takes(0.5)
        handle = handle_of(Quantize("auto", budget=Budget(min_psnr=10)))
        found = handle.calibrate(PROMPTS, **CALL)["transformer"]
        generate(pipe)
        assert {kind for _, kind, _ in found.config.measured} <= {"int8", "int8-rotated"}
        assert "quantize='auto' chose" in str(handle)
        assert handle.choices["transformer"].configs()["quantize"] == found.config

    def test_the_worst_layers_move_up_for_a_narrow_one(self, handle_of, takes):
        takes(0.5)
        wide = handle_of(Quantize("auto", budget=Budget(min_psnr=10)))
        all_layers = wide.calibrate(PROMPTS, **CALL)["transformer"]
        wide.remove()
        narrow = Budget(min_psnr=min(found.psnr for found in all_layers.differences) + 1, quantile=1)
        found = handle_of(Quantize("auto", budget=narrow)).calibrate(PROMPTS, **CALL)["transformer"]
        assert not found.declined
        kept = [name for name, kind, _ in found.config.measured if kind is None]
        assert kept
        worst = [name for name, _ in all_layers.sensitivity.worst("int8", len(kept) + 3)]
        assert kept[0] in worst
        assert min(entry.psnr for entry in found.differences) >= narrow.min_psnr

    def test_no_format_keeps_an_impossible_budget(self, pipe, handle_of, takes):
        takes(0.5)
        plain = generate(pipe)
        handle = handle_of(Quantize("auto", budget=Budget(min_psnr=200)))
        found = handle.calibrate(PROMPTS, **CALL)["transformer"]
        assert "no format keeps the budget of PSNR >= 200 dB" in found.declined
        assert "left it unquantized: no format" in str(handle)
        torch.testing.assert_close(generate(pipe), plain, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("share", "is_chosen"), [(0.98, False), pytest.param(1.2, False, marks=pytest.mark.thorough), (0.96, True)]
    )
    def test_what_saves_less_than_3_percent_is_not_chosen(self, handle_of, takes, share, is_chosen):
        takes(share)
        handle = handle_of(Quantize("auto", budget=Budget(min_psnr=10)))
        found = handle.calibrate(PROMPTS, **CALL)["transformer"]
        assert bool(found.declined) is not is_chosen
        assert ("nothing saves 3%" in str(handle)) is not is_chosen
        assert ("quantize" in handle.choices["transformer"].configs()) is is_chosen

    def test_a_bare_model_has_no_images(self, pipe):
        plan = Plan(quantize="auto", config=CompilationConfig(engine="eager"), progress=False)
        with optimize(pipe.transformer, plan) as handle, pytest.raises(ConfigError, match="compares images"):
            handle.calibrate([{}])


class TestTrial:
    """Plan(measure=True): what the plan names stays, and a lossy technique that it does not name has to save 3 %."""

    PLAIN, LOSSY = Choice(), Choice(quantize="int8")

    @pytest.mark.parametrize(("quantized", "expected"), [(9.8, PLAIN), (9.6, LOSSY), (12.0, PLAIN)])
    def test_a_lossy_one_has_to_save_3_percent(self, quantized, expected):
        taken = {Choice(how="eager"): 20.0, Choice(how="inductor"): 10.5, self.PLAIN: 10.0, self.LOSSY: quantized}
        assert trial.pick(taken)[0] == expected

    def test_what_the_plan_names_stays(self, pipe, monkeypatch):
        def timed(part, choices, calls, seconds=0):
            part.measured = {}
            return {
                choice: 5.0 if choice.how == "eager" else 20.0 if choice == Choice() else 10.0 for choice in choices
            }

        monkeypatch.setattr(trial, "timed", timed)
        plan = Plan(quantize="int8", measure=True, config=CompilationConfig(engine="eager"), progress=False)
        with optimize(pipe, plan) as handle, pytest.warns(RuntimeWarning, match=r"transformer 2\.00 times slower"):
            generate(pipe)
            assert handle.choices["transformer"] == Choice()
            assert "tritium, without quantize 10.00 ms" in str(handle)
            assert "int8" in precisions(handle).values()
