"""`tritium doctor --sharing`, `tritium run --attach` and `tritium keep` on the example."""

import json

import pytest
import torch
from typer.testing import CliRunner

import tritium
from support import keepers
from tritium import example
from tritium.cli.app import app
from tritium.pipelines import sharing
from tritium.sharing.placement import Placement, placements, stored_dtype


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def runtime():
    with keepers.runtime_folder() as folder:
        yield folder


def test_doctor_names_what_is_mapped_private_and_cast(runtime):
    done = invoke("doctor", "--sharing", "example", "--json")
    assert done.exit_code == 0
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["keepers"]["detail"].startswith("none is running")
    assert checks["transformer of example"]["detail"] == "mapped from its files: processes share 15.9 MB"
    assert {check["status"] for check in checks.values()} == {"ok"}


def test_a_cast_loses_the_mapping():
    from tritium.cli.sharing import of_component

    pipe = tritium.load_example(dtype=torch.bfloat16)
    (found,) = [entry for entry in placements(pipe, example.WEIGHTS) if entry.component == "vae"]
    assert found.is_cast
    assert (found.stored, found.dtype) == ("float32", "bfloat16")
    check = of_component(found, "flux")
    assert (check.status, check.fix) == ("warn", "save the pipeline in bfloat16, or share it by `tritium keep flux`")
    private = of_component(Placement("vae", 0, 1000, "float32", "float32"), "flux")
    assert private.detail.startswith("private: each process")
    assert stored_dtype(example.WEIGHTS) is None


def test_doctor_takes_a_pipeline_for_sharing_alone():
    done = invoke("doctor", "example")
    assert done.exit_code == 2
    assert "doctor takes a pipeline with --sharing alone" in done.output


def test_run_draws_with_a_keeper_s_weights(runtime, tmp_path):
    with sharing.keeper("shown") as keeper:
        keeper.publish(tritium.load_example())
        options = ("--eager", "--steps", "2", "--json", "-o")
        prompt = example.PROMPTS[0]
        for output, source in (("a.png", ("--attach", "shown")), ("b.png", ("--device", "cpu"))):
            done = invoke("run", prompt, *source, *options, str(tmp_path / output))
            assert done.exit_code == 0, done.output
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
        status = invoke("doctor", "--sharing").stdout
        assert "ready, 22.8 MB on cpu, generation 1" in " ".join(status.split())
    done = invoke("run", prompt, "--attach", "shown", "--device", "cpu")
    assert "leave out --model and --device" in done.output
    done = invoke("run", prompt, "--attach", "shown")
    assert "there is no keeper named 'shown'" in " ".join(done.output.split())
