"""A technique that only this file defines: it scales what the denoiser returns, and works like the built-in ones."""

import importlib.metadata
import json
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from typer.testing import CliRunner

import tritium
from support import small_pipelines
from support.changed import changed
from tritium import Choice, CompilationConfig, Plan, techniques
from tritium.bench import recipes
from tritium.cli.app import app
from tritium.errors import ConfigError, PipelineError
from tritium.pipelines import recipe, trial
from tritium.pipelines.generation import Job
from tritium.techniques import Note, Technique
from tritium.techniques.channels_last import ChannelsLast

CONFIG = CompilationConfig(engine="eager")
JOB = Job(prompt="a red circle", width=32, height=32, steps=2, extra={"max_sequence_length": 16})


@dataclass(frozen=True)
class Scale:
    """Multiply the output of a part by a factor."""

    factor: float = 2.0

    def __post_init__(self):
        if self.factor <= 0:
            raise ConfigError(f"factor is above 0, got {self.factor}")

    def __str__(self):
        return f"scale {self.factor:g}"


def apply(part, config):
    def scaled(call, args, kwargs):
        output = call(*args, **kwargs)
        return (output[0] * config.factor, *output[1:])

    part.around(scaled)
    part.module.scaled_by = config.factor


def remove(part, state):
    del part.module.scaled_by


def conflicts(config, choice):
    return "scale and channels-last exclude each other" if choice.get(ChannelsLast) else None


SCALE = Technique(
    name="scale",
    config=Scale,
    applies_to=lambda part, config: None if part.name == "transformer" else "it scales denoisers alone",
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    variants=lambda part: [Scale(1.0)] if part.name == "transformer" else [],
    report=lambda part, config, state: Note(f"output times {config.factor:g}", {"factor": config.factor}),
)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Let a package declare the technique, as an installed plug-in does."""
    point = importlib.metadata.EntryPoint("scale", f"{__name__}:SCALE", "tritium.techniques")
    entry_points = importlib.metadata.entry_points

    def with_scale(*, group):
        found = entry_points(group=group)
        return importlib.metadata.EntryPoints([*found, point]) if group == "tritium.techniques" else found

    monkeypatch.setattr(importlib.metadata, "entry_points", with_scale)
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(SCALE=SCALE, __file__=__file__))
    techniques._entries.cache_clear()
    yield
    techniques._entries.cache_clear()


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux(1, 1)


def output(pipe):
    """Return what the pipeline gets from the denoiser in its first step."""
    captured, step = [], pipe.scheduler.step

    def keep(output, *args, **kwargs):
        captured.append(output.clone())
        return step(output, *args, **kwargs)

    pipe.scheduler.step = keep
    try:
        small_pipelines.generate(pipe)
    finally:
        pipe.scheduler.step = step
    return captured[0]


def plan_of(**fields):
    return Plan(config=CONFIG, progress=False, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"scale": {"factor": 3.0}},
        {"techniques": (Scale(3.0),)},
        {"scale": True, "components": {"transformer": {"scale": Scale(3.0)}}},
    ],
    ids=["by name", "by config", "by part"],
)
def test_every_spelling_applies_and_remove_restores(pipe, fields):
    parts = {name: Choice(**choice) for name, choice in fields.pop("components", {}).items()}
    before = output(pipe)
    with tritium.optimize(pipe, plan_of(**fields, components=parts)) as handle:
        torch.testing.assert_close(output(pipe), 3.0 * before)
        assert pipe.transformer.scaled_by == 3.0
        assert "output times 3" in str(handle)
        assert "output times 3" in str(handle.report)
        (part,) = (row for row in handle.report.to_dict()["components"] if row["name"] == "transformer")
        assert part["techniques"]["scale"] == {"factor": 3.0}
        handle.use({"transformer": Choice(scale=False)})
        torch.testing.assert_close(output(pipe), before)
        handle.use({"transformer": Choice(scale=True)})
        torch.testing.assert_close(output(pipe), 2.0 * before)
    assert torch.equal(output(pipe), before)
    assert not hasattr(pipe.transformer, "scaled_by")


def test_parts_without_it_say_why_and_a_choice_is_refused(pipe):
    with tritium.optimize(pipe, plan_of(scale=True)) as handle:
        assert "without scale: it scales denoisers alone" in str(handle)
    wrong = Plan(config=CONFIG, components={"vae.decode": Choice(scale=True)})
    with pytest.raises(PipelineError, match=r"vae\.decode cannot have scale=Scale\(factor=2\.0\): it scales denoisers"):
        tritium.optimize(pipe, wrong)
    assert not hasattr(pipe.transformer, "scaled_by")


def test_a_technique_that_needs_the_scheduler(pipe):
    seen = []

    def keep(part, config):
        seen.append(part.schedulers)

    fields = {
        "needs_scheduler": True,
        "applies_to": lambda part, config: None,
        "apply": keep,
        "remove": lambda *_: None,
    }
    model, named = pipe.transformer, plan_of(components={"model": Choice(scale=True)})
    with changed(SCALE, **fields):
        with tritium.optimize(pipe, plan_of(components={"transformer": Choice(scale=True)})):
            assert seen == [(pipe.scheduler,)]
        with pytest.raises(
            PipelineError, match=r"it needs the scheduler; pass tritium\.optimize\(model, plan, scheduler"
        ):
            tritium.optimize(model, named)
        with tritium.optimize(model, named, scheduler="a scheduler"):
            assert seen[1:] == [("a scheduler",)]
    with pytest.raises(ConfigError, match="this pipeline has its own"):
        tritium.optimize(pipe, scheduler="a scheduler")


def test_a_technique_that_fails_leaves_everything_as_it_was(pipe):
    def broken(part, config):
        raise RuntimeError("no memory")

    with changed(SCALE, apply=broken), pytest.raises(RuntimeError, match="no memory"):
        tritium.optimize(pipe, plan_of(scale=True, channels_last=False))
    calls = [module._compiled_call_impl for module in (pipe.transformer, pipe.vae.decoder, pipe.text_encoder)]
    assert calls == [None] * 3
    with tritium.optimize(pipe, plan_of(components={"vae": "eager"})) as handle:
        with changed(SCALE, apply=broken), pytest.raises(RuntimeError, match="no memory"):
            handle.use({"transformer": Choice(scale=True)})
        assert handle.choices["transformer"] == Choice()
        handle.use({"transformer": Choice(scale=True)})
        assert pipe.transformer.scaled_by == 2.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": Scale, "channels_last": True}, "Plan.scale cannot be"),
        ({"scale": True, "channels_last": True}, "exclude each other"),
        ({"scale": {"factor": -1}}, "Plan.scale: factor is above 0"),
        ({"scle": True}, "did you mean 'scale'"),
    ],
)
def test_wrong_plans_raise_when_they_are_made(fields, message):
    with pytest.raises(ConfigError, match=message):
        Plan(**fields)


def test_the_page_of_the_report_shows_it(pipe, tmp_path):
    with tritium.optimize(pipe, plan_of(scale=True)) as handle:
        small_pipelines.generate(pipe)
        handle.report.to_html(tmp_path / "report.html")
    assert "output times 2" in (tmp_path / "report.html").read_text()


def test_a_recipe_keeps_it(pipe, tmp_path):
    choices = {"transformer": Choice(scale=Scale(3.0))}
    kept = recipe.Recipe(choices=choices, figures={}, fingerprint=recipe.fingerprint_of(pipe))
    kept.save(tmp_path / "recipe.json")
    assert json.loads((tmp_path / "recipe.json").read_text())["choices"]["transformer"]["scale"] == {"factor": 3.0}
    with tritium.optimize(pipe, tmp_path / "recipe.json") as handle:
        assert handle.choices["transformer"] == choices["transformer"]
    techniques._entries.cache_clear()
    without = recipe.fingerprint_of(pipe)
    assert kept.fingerprint == without, "the file of this test is counted either way"


def test_tuning_tries_it(pipe, monkeypatch):
    def fastest(taken):
        return next(choice for choice in taken if choice.get(Scale)), "it scales"

    ways = trial.ways
    monkeypatch.setattr(trial, "ways", lambda part: [way for way in ways(part) if way.how != "inductor"])
    monkeypatch.setattr(
        trial, "pick", lambda taken: fastest(taken) if any(c.get(Scale) for c in taken) else (Choice(how="eager"), "")
    )
    plan = recipes.Plan
    monkeypatch.setattr(recipes, "Plan", lambda **fields: plan(config=CONFIG, **fields))
    found = recipes.tune(pipe, [JOB], recipes.Search(seconds=0.0), lambda *_: None)
    assert "tritium, scale 1" in found.figures["parts"]["transformer"]["milliseconds"]
    assert found.choices["transformer"] == Choice(scale=Scale(1.0))


def test_the_command_line_takes_it():
    result = CliRunner().invoke(app, ["run", "--technique", "scle"])
    assert result.exit_code == 2
    assert "did you mean 'scale'" in result.output
