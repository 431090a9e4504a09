"""Recipes: what was measured, for what, and what happens elsewhere."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import torch

import tritium
from support import scripts, small_pipelines
from tritium import Choice, example, quality
from tritium.bench import recipes
from tritium.errors import ConfigError, RecipeError, RecipeMismatch
from tritium.pipelines import recipe, trial
from tritium.pipelines.generation import Job, generate
from tritium.pipelines.recipe import Recipe


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux()


@pytest.fixture
def saved(pipe, tmp_path):
    choices = {"vae": Choice(how="eager"), "transformer": Choice(how="eager")}
    found = Recipe(choices=choices, figures={}, fingerprint=recipe.fingerprint_of(pipe))
    found.save(tmp_path / "recipe.json")
    return tmp_path / "recipe.json"


def edited(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


class TestFile:
    def test_round_trip(self, saved, pipe):
        found = recipe.load(saved)
        assert found.choices == {"vae": Choice(how="eager"), "transformer": Choice(how="eager")}
        assert found.fingerprint == recipe.fingerprint_of(pipe)

    def test_optimize_applies_it(self, saved, pipe):
        with tritium.optimize(pipe, saved) as handle:
            assert {choice.how for choice in handle.choices.values()} == {"eager"}
        with tritium.optimize(pipe, str(saved)):
            pass

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is no JSON"),
            ("[]", "is no recipe"),
            ('{"format": 99}', "has format 99, and this version reads 2"),
            ('{"format": 2}', "cannot be understood"),
            ('{"format": 2, "choices": {"vae": {"how": "fast"}}, "figures": {}, "fingerprint": {}}', "did you mean"),
        ],
    )
    def test_what_is_no_recipe(self, tmp_path, pipe, text, message):
        path = tmp_path / "recipe.json"
        path.write_text(text)
        with pytest.raises(RecipeError, match=message) if "mean" not in message else pytest.raises(RecipeError):
            tritium.optimize(pipe, path)

    def test_a_file_that_is_not_there(self, tmp_path, pipe):
        with pytest.raises(RecipeError, match="cannot be read: No such file"):
            tritium.optimize(pipe, tmp_path / "absent.json")


class TestElsewhere:
    @pytest.mark.parametrize("part", ["torch", "device", "diffusers", "python"])
    def test_each_ingredient_is_named(self, saved, pipe, part):
        edited(saved, lambda found: found["fingerprint"].update({part: "0.0"}))
        with pytest.raises(RecipeMismatch, match=rf"{part}: 0\.0 there.*tritium tune.*accept_differences=True"):
            tritium.optimize(pipe, saved)

    def test_another_model_is_named(self, saved):
        with pytest.raises(RecipeMismatch, match="transformer is configured otherwise"):
            tritium.optimize(small_pipelines.flux(double=1), saved)

    def test_it_goes_on_when_told(self, saved, pipe):
        edited(saved, lambda found: found["fingerprint"].update({"torch": "0.0"}))
        with tritium.optimize(pipe, saved, accept_differences=True) as handle:
            assert handle.choices["transformer"].how == "eager"

    def test_accepting_without_a_recipe_is_an_error(self, pipe):
        with pytest.raises(ConfigError, match="no recipe was given"):
            tritium.optimize(pipe, accept_differences=True)


class TestShipped:
    """The recipe of the example pipeline, which applies by its name."""

    @pytest.fixture(scope="class")
    def here(self):
        found = example.load_example()
        found.set_progress_bar_config(disable=True)
        return found

    def test_a_held_out_job_keeps_the_budget(self, here, monkeypatch):
        monkeypatch.setenv("TRITIUM_ENGINE", "eager")
        job = Job(**recipe.load(Path("example")).figures["held_out_jobs"][0])
        plain = generate(here, job)
        with tritium.optimize(here, "example") as handle:
            ours = generate(here, job)
            record = handle.skipping.images["transformer"]
            assert record.rows == handle.choices["transformer"].get(tritium.Skip).actions()
            assert record.skipped >= 14
        assert ours.difference(plain).psnr > 32

    @pytest.mark.parametrize(("capability", "used"), [(None, {"skip", "quantize"}), ("9.0", {"skip"})])
    def test_formats_need_the_same_instructions(self, here, monkeypatch, tmp_path, capability, used):
        found = json.loads(example.RECIPE.read_text())
        found["choices"]["transformer"]["quantize"] = {"linear": "int8"}
        found["fingerprint"] |= {"torch": "0.0", "capability": capability or recipe.fingerprint_of(here).capability}
        (tmp_path / "shipped.json").write_text(json.dumps(found))
        monkeypatch.setitem(recipe.SHIPPED, "example", tmp_path / "shipped.json")
        plan = recipe.load(Path("example")).plan_for(here)
        assert set(plan.components) == {"transformer"}
        assert set(plan.choice("transformer").configs()) == used

    def test_all_of_it_on_request(self, here):
        found = recipe.load(Path("example"))
        plan = found.plan_for(here, accept_differences=True)
        assert dict(plan.components) == dict(found.choices)

    def test_another_model_is_refused(self, pipe):
        with pytest.raises(RecipeMismatch, match="this one has another denoiser"):
            tritium.optimize(pipe, "example")

    def test_a_file_of_that_name_comes_first(self, saved, monkeypatch, pipe):
        monkeypatch.chdir(saved.parent)
        saved.rename(saved.parent / "example")
        assert not recipe.load(Path("example")).shipped

    def test_what_was_measured_is_in_it(self):
        figures = recipe.load(Path("example")).figures
        assert figures["budget"]["min_psnr"] == 32
        assert min(row["psnr"] for row in (*figures["per_job"], *figures["held_out"])) >= 32

    def test_the_wheel_has_all_files_of_the_example(self):
        settings = tomllib.loads((scripts.ROOT / "pyproject.toml").read_text())
        package = scripts.ROOT / "src" / "tritium"
        patterns = settings["tool"]["setuptools"]["package-data"]["tritium"]
        # In setuptools a pattern's ** also matches files.
        packed = {path for pattern in patterns for path in package.glob(pattern.replace("**", "**/*"))}
        assert {example.RECIPE, example.WEIGHTS / "model_index.json"} <= packed


class TestTuning:
    JOBS = (
        Job(prompt="a red circle", width=32, height=32, steps=2, extra={"max_sequence_length": 16}),
        Job(prompt="a blue square", width=48, height=32, steps=2, seed=1, extra={"max_sequence_length": 16}),
    )

    @pytest.fixture
    def only_eager_and_layout(self, monkeypatch):
        """Two ways that need no compiler: what is tested is how they are chosen."""

        def ways(part):
            found = [Choice(how="eager")]
            if part.name == "vae.decode":
                found.append(Choice(how="tritium"))
            return found

        monkeypatch.setattr(trial, "ways", ways)
        config = tritium.CompilationConfig(engine="eager")
        plan = recipes.Plan
        monkeypatch.setattr(recipes, "Plan", lambda **fields: plan(config=config, **fields))

    def test_it_measures_every_part_that_was_called_on_every_job(self, pipe, only_eager_and_layout, monkeypatch):
        asked = {}
        decide = trial.decide

        def noted(part, calls, seconds):
            asked[part.name] = [call[1].get("hidden_states", torch.zeros(0)).shape for call in calls]
            decide(part, calls, seconds=0.0)

        monkeypatch.setattr(trial, "decide", noted)
        found = recipes.tune(pipe, self.JOBS, recipes.Search(seconds=0.0), lambda *_: None)
        assert set(asked) == {"transformer", "vae.decode", "text_encoder", "text_encoder_2"}
        assert asked["transformer"] == [(1, 64, 16), (1, 96, 16)]
        assert found.fingerprint == recipe.fingerprint_of(pipe)
        assert set(found.figures["parts"]["vae.decode"]["milliseconds"]) == {"eager", "tritium"}
        assert found.figures["images"]["eager"]["seconds"] > 0
        assert found.choices["vae.encode"].how == "eager", "it was never called"
        with tritium.optimize(pipe, found.plan_for(pipe)) as handle:
            assert handle.choices == dict(found.choices)

    def test_a_part_past_the_budget_is_left_alone(self, pipe, only_eager_and_layout, monkeypatch):
        def faster(taken):
            return max(taken, key=lambda choice: choice.how == "tritium"), "made up"

        monkeypatch.setattr(trial, "pick", faster)
        measured = quality.difference

        def worse(image, reference, *args, **kwargs):
            return dataclasses.replace(measured(image, reference, *args, **kwargs), psnr=20.0)

        monkeypatch.setattr(quality, "difference", worse)
        found = recipes.tune(pipe, self.JOBS[:1], recipes.Search(seconds=0.0), lambda *_: None)
        assert found.choices["vae.decode"].how == "eager"
        assert "20.0 dB with it; asked for was PSNR >= 40 dB" in found.figures["parts"]["vae.decode"]["why"]

    def test_without_jobs_there_is_nothing_to_tune(self, pipe):
        with pytest.raises(ConfigError, match="at least one prompt"):
            recipes.tune(pipe, [], recipes.Search(), lambda *_: None)
