"""`tritium plan`: a table from tabled rates, without a GPU and without running anything."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tritium.cli.app import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_example_is_planned_without_a_gpu():
    done = invoke("example", "--vram", "260MB")
    assert done.exit_code == 0, done.stderr
    assert "resident" in done.stdout
    assert "tabled" in done.stdout
    assert "nothing was run" in done.stdout
    assert "text_encoder" in done.stdout


def test_flux_at_sixteen_gigabytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("flux", "--vram", "16GB", "--link", "50GB", "--tflops", "700", "--json")
    found = json.loads(done.stdout)
    kept = sum(block["size"] for block in found["blocks"] if block["resident"])
    slots = found["slots"] * max(block["size"] for block in found["blocks"] if not block["resident"])
    assert len(found["blocks"]) == 58
    assert kept + slots + found["rest"] + found["activations"] <= 16_000_000_000
    assert 1.5 < found["step_ms"] / found["resident_step_ms"] < 2.2
    assert 0.7 < found["needed_share"] < 0.85


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flux-two", "--vram", "16GB"), "there is no pipeline 'flux-two'"),
        (("flux", "--vram", "lots"), "a budget cannot be 'lots'; write '16GB'"),
        (("wan", "--vram", "12GB", "--size", "512x512"), "the model makes videos; leave it out"),
        (("example", "--vram", "1MB"), "does not fit into 1 MB: it needs"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, message):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
