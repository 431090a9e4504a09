"""`tritium run`, and whole pipelines in `bench` and `tune`: on a tiny pipeline, rewritten without generating code."""

import json
import re

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from support import small_pipelines
from support.bench import job
from tritium import Choice, Skip
from tritium.bench.results import Results
from tritium.bench.search import engines
from tritium.cli.app import app
from tritium.errors import ConfigError
from tritium.pipelines import recipe, trial
from tritium.pipelines.generation import Job

EAGER = {"TRITIUM_ENGINE": "eager"}


def invoke(*arguments, env=EAGER):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    small_pipelines.flux(1, 1).save_pretrained(path)
    return path


def draw(folder, *more):
    return invoke("run", "a red circle", "--model", folder, "--size", "32x32", "--steps", 1, *more)


class TestRun:
    def test_it_draws(self, folder, tmp_path):
        done = draw(folder, "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        assert "transformer" in done.stdout
        with Image.open(tmp_path / "out.png") as image:
            assert image.size == (32, 32)

    def test_it_draws_with_quantized_linears(self, folder, tmp_path):
        done = draw(folder, "--quantize", "int8-weights", "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        assert re.search(r"quantized: \d+ linears in int8-weights", " ".join(done.stdout.split()))

    def test_too_little_memory_is_one_line(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("tritium.cli.run.generate", lambda *_: torch.empty(2**60))
        done = draw(folder, "--eager", "-o", tmp_path / "out.png")
        assert done.exit_code == 2
        assert "--size 32x32 does not fit into memory" in done.stderr

    def test_a_budget_that_is_too_small_is_named(self, folder, tmp_path):
        done = draw(folder, "--vram", "1kB", "-o", tmp_path / "out.png")
        assert done.exit_code == 2
        assert "does not fit into 1 kB" in done.stderr.splitlines()[-1]

    @pytest.mark.parametrize("more", [(), ("--eager",)])
    def test_an_attention_that_does_not_exist(self, folder, tmp_path, more):
        wrong = {**EAGER, "TRITIUM_ATTENTION": "banana"}
        done = invoke("run", "a", "--model", folder, "-o", tmp_path / "out.png", *more, env=wrong)
        assert done.exit_code == 2
        assert "TRITIUM_ATTENTION=banana: unknown attention implementation" in done.stderr

    def test_it_compares(self, folder, tmp_path):
        done = draw(folder, "--compare", "--json", "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert set(found["seconds"]) == {"eager", "tritium", "first"}
        # Rewrites on engine `eager` are what the model computes, in its own order.
        assert found["difference"]["psnr"] is None or found["difference"]["psnr"] > 80
        with Image.open(tmp_path / "out.png") as image:
            assert image.width > 3 * 256

    def test_within_a_budget(self, folder, tmp_path):
        done = draw(folder, "--vram", "20MB", "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        assert "memory 20MB: all weights stay on the device" in done.stdout

    def test_a_recipe_is_applied(self, folder, tmp_path):
        pipe = type(small_pipelines.flux(1, 1)).from_pretrained(folder)
        choices = {"transformer": Choice(how="eager"), "vae": Choice(how="eager")}
        found = recipe.Recipe(choices=choices, figures={}, fingerprint=recipe.fingerprint_of(pipe))
        found.save(tmp_path / "recipe.json")
        done = draw(folder, "--recipe", tmp_path / "recipe.json", "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        assert "compiled" not in done.stdout.replace("compiling", "")

    @pytest.mark.parametrize(("on_other", "message"), [("run", "no plan for 1 steps"), ("error", "on_other='error'")])
    def test_a_recipe_at_other_steps(self, folder, tmp_path, on_other, message):
        pipe = type(small_pipelines.flux(1, 1)).from_pretrained(folder)
        choices = {"transformer": Choice(how="eager", skip=Skip("RRR1R1R1")), "vae": Choice(how="eager")}
        found = recipe.Recipe(choices=choices, figures={}, fingerprint=recipe.fingerprint_of(pipe))
        found.save(tmp_path / "recipe.json")
        more = ("--recipe", tmp_path / "recipe.json", "-o", tmp_path / "out.png", "--on-other", on_other)
        done = draw(folder, *more)
        assert done.exit_code == (2 if on_other == "error" else 0), done.output
        assert message in " ".join(done.output.split())

    def test_the_example_draws_its_first_prompt_without_tritium(self, tmp_path):
        done = invoke("run", "--eager", "--json", "--steps", 1, "-o", tmp_path / "out.png")
        assert done.exit_code == 0, done.output
        assert set(json.loads(done.stdout)["seconds"]) == {"eager"}
        with Image.open(tmp_path / "out.png") as image:
            assert image.size == (128, 128)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a red dragon"], "does not know 'dragon'; its words are: 2 3 a above"),
            (["a red circle", "--size", "100x128"], "width 100 is not a multiple of 16"),
            (["a red circle", "--size", "128"], "is not WIDTHxHEIGHT"),
            (["a red circle", "--size", "128x0"], "height 0 is not a multiple of 16"),
            (["a red circle", "--size", "\u00b2x16"], "is not WIDTHxHEIGHT"),
            (["a red circle", "--seed", "99999999999999999999999"], "is out of range: torch takes -2**63 to 2**64 - 1"),
            (["a red circle", "--steps", "0"], "steps must be at least 1"),
            (["a red circle", "--model", "nowhere"], "there is no model 'nowhere'"),
            (["a red circle", "--model", "."], "is no diffusers pipeline: it has no model_index.json"),
            (["a red circle", "--eager", "--compare"], "leave out --compare"),
            (["a red circle", "--eager", "--quantize", "int8"], "leave out --compare"),
            (["a red circle", "--quantize", "fp7"], "Plan.quantize: linear cannot be 'fp7'; did you mean 'fp8'?"),
            (["a", "--quantize", "fp8", "--technique", "quantize=fp8"], "are the same; leave one of them out"),
            (["a", "--vram", "1GB", "--technique", "memory=2GB"], "are the same; leave one of them out"),
            (["a", "--vram", "lots"], "a budget cannot be 'lots'"),
            (["a red circle", "--eager", "--vram", "1GB"], "leave out --compare"),
            (["a", "--quantize", "fp8", "--recipe", "r.json"], "a recipe has its own techniques"),
            # Files are read before the model, which may take minutes.
            (["a", "--model", "nowhere", "--recipe", "absent.json"], "recipe absent.json cannot be read"),
            (["a", "--model", "nowhere", "--artifacts", "absent.tritium"], "there is no file absent.tritium"),
            (["a red circle", "--on-other", "run"], "--on-other concerns a recipe: name one with --recipe"),
            (["a red circle", "--accept-differences"], "--accept-differences concerns a recipe"),
            (["a", "--recipe", "example", "--on-other", "eror"], "did you mean 'error'?"),
            (["a red circle", "--device", "tpu"], "device 'tpu' is not known"),
            (["a red circle", "-o", "/proc/out.png"], "/proc/out.png cannot be written"),
            (["a red circle", "-o", "out"], "has no ending"),
            (["a red circle", "-o", "missing/out.png"], "there is no folder missing"),
            (["a red circle", "--size", "65552x16"], "a side has at most 65536 pixels"),
            (["--model", "."], "needs a prompt"),
        ],
    )
    def test_wrong_input_is_one_line_and_exit_code_2(self, arguments, message, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        done = invoke("run", *arguments)
        assert done.exit_code == 2
        lines = [line for line in done.stderr.splitlines() if line.startswith("tritium: ")]
        assert len(lines) == 1
        assert message in lines[0]
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (b"{}", "KeyError"),
            (b"\xff", "OSError"),
            (b'{"_class_name": "NoSuchPipeline"}', "AttributeError"),
            (b'{"_class_name": "FluxPipeline", "vae": 3}', "TypeError"),
        ],
    )
    def test_an_index_that_means_nothing_is_one_line(self, index, message, tmp_path):
        (tmp_path / "model_index.json").write_bytes(index)
        done = draw(tmp_path, "-o", tmp_path / "out.png")
        assert done.exit_code == 2
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("tritium: ")]
        assert f"is no diffusers pipeline: it cannot be loaded: {message}" in line

    @pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
    def test_seeds_that_torch_takes(self, seed):
        assert torch.Generator().manual_seed(Job(prompt="", seed=seed).seed)
        for outside in (-(2**63) - 1, 2**64):
            with pytest.raises(ConfigError, match="out of range"):
                Job(prompt="", seed=outside)


class TestBench:
    def test_a_folder_and_its_quantized_linears(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("tritium.bench.generation.jobs_for", small_jobs)
        out = ("--json", tmp_path / "found.json")
        done = invoke("bench", folder, "--warm", "--against", "eager", "--seconds", 0, "--quantize", "int8", *out)
        assert done.exit_code == 0, done.output
        rows = {row.variant: row for row in Results.load(tmp_path / "found.json").rows}
        assert set(rows) == {"eager", "tritium", "tritium int8"}
        assert rows["eager"].psnr is None
        assert rows["eager"].ssim == pytest.approx(1)
        assert rows["tritium"].median_ms > 0
        assert "PSNR dB" in done.stdout
        assert rows["tritium"].relative_l2 < 1e-5 < 1e-4 < rows["tritium int8"].relative_l2 < 0.1

    def test_options_of_single_models_are_refused(self, folder):
        done = invoke("bench", folder, "--exact")
        assert done.exit_code == 2
        assert "concern single models" in done.stderr


def small_jobs(_name, **_options):
    return [job()]


class TestTune:
    @pytest.fixture
    def few_ways(self, monkeypatch):
        """No plain torch.compile, whose C++ compiler takes most of a search."""
        monkeypatch.setattr(trial, "ways", lambda installed: [Choice(how="eager"), Choice(how="tritium")])
        monkeypatch.setattr(
            engines, "plain_compile", lambda handle, calls: dict.fromkeys(handle.choices, engines.EAGER)
        )

    def test_a_recipe_is_written_and_applied(self, folder, tmp_path, few_ways):
        out = tmp_path / "recipe.json"
        size = ("--size", "32x32", "--steps", 1)
        # tests/bench/search has longer searches.
        short = ("--seconds", 0.1, "--quick", "--no-skip")
        done = invoke("tune", folder, "--prompt", "a red circle", *size, *short, "-o", out)
        assert done.exit_code == 0, done.output
        assert "times as fast" in done.stdout
        found = recipe.load(out)
        assert set(found.choices) >= {"transformer", "vae.decode", "text_encoder"}
        assert found.figures["jobs"][0]["width"] == 32
        assert draw(folder, "--recipe", out, "-o", tmp_path / "out.png").exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["example", "--show"], "--show and --dtype concern ops"),
            (["rms_norm", "--min-psnr", "40"], "--min-psnr: for pipelines alone, and none was named"),
            (["example", "--prompt", "a dragon"], "does not know 'dragon'"),
            (["example", "-o", "/proc/recipe.json"], "cannot be written"),
            (["example", "--size", "1x1"], "not a multiple of 16"),
            (["example", "--min-psnr", "nan"], "min_psnr is a number, got nan"),
            (["nosuch", "-o", "r.json"], "there is no model 'nosuch': it is neither 'example' nor a folder"),
            ([".", "-o", "r.json"], "is no diffusers pipeline: it has no model_index.json"),
            (["-o", "r.json"], "--output: for pipelines alone, and none was named; add 'example' or a folder"),
        ],
    )
    def test_wrong_input(self, arguments, message, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        done = invoke("tune", *arguments)
        assert done.exit_code == 2
        assert message in done.stderr
        assert not list(tmp_path.iterdir())

    def test_a_recipe_that_is_not_written_leaves_no_file(self, tmp_path):
        (tmp_path / "model_index.json").write_text("[]")
        done = invoke("tune", tmp_path, "-o", tmp_path / "recipe.json")
        assert done.exit_code == 2
        assert not (tmp_path / "recipe.json").exists()

    def test_what_is_known_as_json(self):
        done = invoke("tune", "--show", "--json", "--device", "cpu")
        assert done.exit_code == 0
        assert json.loads(done.stdout)["rows"] == []


class TestExplain:
    def test_a_pipeline_is_explained_with_its_components(self, folder, monkeypatch):
        monkeypatch.setattr("tritium.bench.generation.jobs_for", small_jobs)
        done = invoke("explain", folder, "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert {"transformer", "vae.decode"} <= {component["name"] for component in found["components"]}
        assert found["sites"]["rope"]["declined"] == 0

    def test_as_a_page(self, folder, tmp_path, monkeypatch):
        monkeypatch.setattr("tritium.bench.generation.jobs_for", small_jobs)
        done = invoke("explain", folder, "--html", tmp_path / "report.html")
        assert done.exit_code == 0, done.output
        assert "FluxPipeline, one image of" in (tmp_path / "report.html").read_text()
