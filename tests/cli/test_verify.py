"""`tritium verify` on a folder: table, JSON, exit codes."""

from __future__ import annotations

import importlib
import json

import pytest
from typer.testing import CliRunner

from support.changed import wrong_provider
from tritium.cli.app import app

pytest.importorskip("diffusers")
small_pipelines = importlib.import_module("support.small_pipelines")

ENGINE = {"TRITIUM_ENGINE": "eager"}
WRONG = {
    **ENGINE,
    "TRITIUM_FORCE_PROVIDER": "rms_norm=triton",
    "TRITIUM_FUSION_PATTERNS__ENABLE_QK_NORM_ROPE": "0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    small_pipelines.flux(double=1, single=1).save_pretrained(path)
    return str(path)


def invoke(*arguments, env=ENGINE):
    return CliRunner().invoke(app, ["verify", *arguments], env=env)


def verify(folder, *arguments, env=ENGINE):
    return invoke("--model", folder, "--device", "cpu", "--size", "32x32", "--steps", "1", *arguments, env=env)


def test_a_right_pipeline_exits_with_0(folder):
    result = verify(folder, "--prompt", "a red circle", "--prompt", "a blue square", "--seed", "3", "--seed", "4")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if "32x32" in line]
    assert [(" ".join(line[:3]), line[4]) for line in lines] == [
        ("a red circle", "3"),
        ("a red circle", "4"),
        ("a blue square", "3"),
        ("a blue square", "4"),
    ]
    assert "worst" in result.stdout
    assert "passed: min psnr 40" in result.stdout
    assert "accelerated: " in result.stderr


def test_json_is_all_there_is_on_stdout(folder):
    result = verify(folder, "--json", "--min-ssim", "0.9")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"]
    assert found["model"] == folder
    assert found["thresholds"] == {"min_psnr": 40.0, "min_ssim": 0.9}
    assert found["rows"][0]["ssim"] == pytest.approx(1)


def test_a_wrong_provider_exits_with_1_and_is_located(folder):
    with wrong_provider("rms_norm", lambda result, *_: result * 20 + 3):
        result = verify(folder, "--locate", "--min-psnr", "90", env=WRONG)
    assert result.exit_code == 1, result.output
    assert "FAILED: psnr " in result.stdout
    located = next(line for line in result.stdout.splitlines() if line.startswith("located: "))
    for part in ("transformer.transformer_blocks.0 (FluxTransformerBlock)", "fusion 'rms_norm'", "provider 'triton'"):
        assert part in located


@pytest.mark.parametrize("how", ["int8", '{"linear": "int8", "layers": {"proj_out": null}}'])
def test_quantized_images_have_a_limit_of_their_own(folder, how):
    result = verify(folder, "--quantize", how, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["thresholds"] == {"min_psnr": 33.0}
    # A run without it has only the errors of rounding.
    assert 33 < found["rows"][0]["psnr"] < 100
    (note,) = found["notes"]
    assert note.startswith("transformer: quantized: ")
    assert "linears in int8" in note


def test_a_quantized_run_may_fail_and_says_what_was_quantized(folder):
    result = verify(folder, "--quantize", "int8", "--min-psnr", "150")
    assert result.exit_code == 1, result.output
    assert "transformer: quantized: " in result.stdout
    assert "FAILED: psnr " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "there is no model 'nowhere'"),
        (["--model", "nowhere", "--size", "33x32"], "width 33 is not a multiple of 16"),
        (["--model", "nowhere", "--size", "big"], "is not WIDTHxHEIGHT"),
        (["--model", "nowhere", "--steps", "0"], "steps must be at least 1"),
        (["--model", "nowhere", "--min-ssim", "2"], "equal images have 1"),
        (["--model", "nowhere", "--device", "tpu"], "device 'tpu' is not known"),
        (["--model", "nowhere", "--accept-differences"], "give --recipe with it"),
        (["--model", "nowhere", "--quantize", "int9"], "Plan.quantize: linear cannot be 'int9'; did you mean 'int8'?"),
        (["--model", "nowhere", "--quantize", '{"linear'], "is neither a format nor JSON"),
        (["--quantize", "int8", "--recipe", "r.json"], "leave out --quantize or --recipe"),
        # Before the model, which may take minutes.
        (["--model", "nowhere", "--recipe", "absent.json"], "recipe absent.json cannot be read"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
