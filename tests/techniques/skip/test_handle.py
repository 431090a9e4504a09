"""`handle.skipping`: switches, the row of letters of every image, block executions, and the report."""

import json

import pytest
import torch

import tritium
from support.denoising import Denoiser, euler, generate, optimized, plan
from tritium import Choice, Plan, Skip
from tritium.errors import ConfigError, PipelineError


@pytest.fixture
def model():
    return Denoiser()


def test_off_and_on(model):
    scheduler, skip = euler(), Skip("RRR1R1R1")
    exact = generate(model, scheduler)
    with optimized(model, skip, scheduler) as handle:
        lossy = generate(model, scheduler)
        handle.skipping.off()
        assert torch.equal(generate(model, scheduler), exact)
        assert "switched off" in str(handle)
        assert "switched off" in str(handle.skipping)
        # Another way of running does not switch it on.
        handle.use({"model": Choice(how="eager", skip=Skip("RRR11111"))})
        assert torch.equal(generate(model, scheduler), exact)
        handle.use({"model": "eager"})
        handle.skipping.on()
        assert torch.equal(generate(model, scheduler), lossy)
        handle.skipping.off()
    # A later handle starts with skipping on.
    with optimized(model, skip, scheduler):
        assert torch.equal(generate(model, scheduler), lossy)
    assert torch.equal(generate(model, scheduler), exact)


def test_off_within_an_image(model):
    """Steps that ran while it was off are in no history, so forecasts start again."""
    scheduler = euler()
    with optimized(model, Skip("RRR1R111"), scheduler) as handle, torch.no_grad():
        scheduler.set_timesteps(8)
        latents = torch.ones(1, 3, 6)
        for step, time in enumerate(scheduler.timesteps):
            (handle.skipping.off if step in (4, 5) else handle.skipping.on)()
            latents = scheduler.step(model(latents, time)[0], time, latents, return_dict=False)[0]
        assert handle.skipping.images["model"].rows == ["RR"]


def test_the_summary_has_rows_and_executions(model, capsys):
    scheduler = euler()
    skip = Skip(("RRR1R1R1", "RRRRDDRD"), loss="PSNR 33.1 dB in 7 of 8 jobs")
    with optimized(model, skip, scheduler) as handle:
        assert "no image yet" in str(handle.skipping)
        generate(model, scheduler, guidance=(0.0, 0.3))
        handle.skipping.summary()
        found = handle.skipping.to_dict()["model"]
        report = handle.report.to_dict()["components"][0]["techniques"]["skip"]
        json.dumps(report)
        text = str(handle)
    printed = capsys.readouterr().out
    assert "branch 0: RRR1R1R1" in printed
    # Where the first branch is forecast nothing can be derived from it.
    assert "branch 1: RRRRDRRR" in printed
    assert "block executions: 48 done, 48 planned, 64 without skipping; about" in printed
    assert "ran 2 calls in spite of the plan: the first branch did not run in this step" in printed
    assert "PSNR 33.1 dB in 7 of 8 jobs" in printed
    assert found["blocks"] == {"done": 48, "planned": 48, "without": 64}
    assert found["seconds_saved"] > 0
    assert report["last"]["rows"] == ["RRR1R1R1", "RRRRDRRR"]
    assert report["bytes"] == (2 * 2 + 1) * 18 * 4
    assert "last image 48 of 64 block executions (RRR1R1R1 / RRRRDRRR)" in text


def test_without_a_plan_it_says_so(model):
    with tritium.optimize(model, Plan(components={"model": "eager"}, progress=False)) as handle:
        assert str(handle.skipping) == "nothing is skipped: no part has a plan"
        with pytest.raises(PipelineError, match="no part has a plan"), handle.skipping.image(4):
            pass


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": 4, "calls": 0}])
def test_an_image_has_steps_and_calls(model, arguments):
    with (
        optimized(model, Skip("RRR1"), euler()) as handle,
        pytest.raises(ConfigError, match="1 step or more"),
        handle.skipping.image(**arguments),
    ):
        pass


def test_more_calls_than_announced_run(model):
    scheduler = euler()
    with optimized(model, Skip("R000"), None) as handle:
        with handle.skipping.image(4), torch.no_grad():
            for _ in range(5):
                model(torch.ones(1, 3, 6), torch.tensor(1.0))
        assert "more calls than skipping.image() announced" in str(handle)
        assert handle.skipping.images["model"].rows == ["R000"]
        assert scheduler is not None


def test_removal_leaves_nothing(model):
    scheduler = euler()
    before = [dict(module.__dict__) for module in model.modules()]
    keys = set(vars(scheduler))
    for skip in (Skip("RRR1R1R1"), Skip("RRBBRBRB", span=(1, 3)), Skip(adaptive=0.5)):
        with tritium.optimize(model, plan(skip), scheduler=scheduler):
            generate(model, scheduler)
        for module, attributes in zip(model.modules(), before, strict=True):
            assert module.__dict__.keys() == attributes.keys()
            assert module._compiled_call_impl is None
    assert {name for name in set(vars(scheduler)) - keys if not name.startswith("_")} <= {"num_inference_steps"}
