"""Measure the quantized parts of a pipeline on jobs: errors by layer, scales of inputs, and formats within a budget.

Errors and ranges are measured in eager runs with hooks, and so are the images that candidate formats would give. Only what
is chosen is compiled, compared with compiled unquantized images, and timed against the unquantized part.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritium import compat
from tritium.budget import Budget
from tritium.errors import ConfigError
from tritium.pipelines import trial
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.part import Part
from tritium.pipelines.parts import KEPT, BareModel
from tritium.quality import Difference
from tritium.techniques.choice import Choice, Off
from tritium.techniques.quantize import Quantize, calibrating
from tritium.techniques.quantize.selection import candidates, select
from tritium.techniques.quantize.sensitivity import Observation, Sensitivity, emulating, observing

NAME = "quantize"

EAGER = Choice(how="eager", techniques=(Off(NAME),))

# The budget of "auto" without another one: the median of fp8 images is above it on models that quantize well.
BUDGET = Budget(min_psnr=33.0)


@dataclass(frozen=True)
class Calibration:
    """What was measured for one part, and the config that follows from it: pass it to a `Plan` in another process."""

    config: Quantize
    sensitivity: Sensitivity
    # Differences to the images without quantization; empty if images were not compared.
    differences: tuple[Difference, ...] = ()
    # Milliseconds of a call, by way of running.
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    # Why the part is left unquantized, or empty.
    declined: str = ""

    @property
    def psnr(self) -> float | None:
        """Return the median PSNR of the images."""
        return statistics.median(found.psnr for found in self.differences) if self.differences else None

    def __str__(self) -> str:
        words = [self.declined or str(self.config)]
        words += [f"median PSNR {self.psnr:.1f} dB"] if self.psnr is not None else []
        words += (
            [", ".join(f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items())] if self.milliseconds else []
        )
        return "; ".join(words)


@dataclass
class Runner:
    """Runs the jobs of a pipeline, or the calls of a bare model, which has no images to compare."""

    source: Any
    jobs: list[Any]

    @property
    def has_images(self) -> bool:
        return not isinstance(self.source, BareModel)

    def run(self) -> list[Image]:
        if self.has_images:
            return [generate(self.source, job) for job in self.jobs]
        with torch.no_grad():
            for call in self.jobs:
                self.source.module(**call)
        return []

    def step(self) -> int:
        scheduler = getattr(self.source, "scheduler", None)
        return 0 if scheduler is None else compat.diffusers.step_of(scheduler)

    def steps(self) -> int:
        scheduler = getattr(self.source, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        return 1 if timesteps is None else max(1, len(timesteps))

    def measures_errors(self, step: int) -> bool:
        """Return True in the first, the middle and the last step: the errors of others lie between theirs."""
        return step in (0, self.steps() // 2, self.steps() - 1)


def runner_of(source: Any, prompts: Any, call: Mapping[str, Any]) -> Runner:
    """Return what runs prompts, or the keyword arguments of calls of a bare model; raise a `ConfigError` otherwise."""
    prompts = [prompts] if isinstance(prompts, (str, Mapping, Job)) else list(prompts or ())
    if not prompts:
        raise ConfigError("there is nothing to measure on: give prompts as a list of strings")
    if isinstance(source, BareModel):
        if not all(isinstance(entry, Mapping) for entry in prompts):
            raise ConfigError("a bare model is measured on calls: give a list of its keyword arguments")
        return Runner(source, [dict(entry) | dict(call) for entry in prompts])
    jobs = []
    for seed, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, Job)):
            raise ConfigError(f"prompts are strings, got {prompt!r}")
        jobs.append(prompt if isinstance(prompt, Job) else Job(prompt=prompt, seed=seed, extra=dict(call)))
    return Runner(source, jobs)


def sensitivity(parts: Sequence[Part], runner: Runner) -> dict[str, Sensitivity]:
    """Return the errors of every format at every linear of denoisers and quantized parts."""
    configs = _quantized(parts)
    wanted = {part: configs.get(part.name, Quantize()) for part in parts if part.name in {*configs, *KEPT}}
    found, _ = _observed(wanted, runner)
    return {part.name: found[part] for part in wanted}


def calibrate(handle: Any, parts: Sequence[Part], runner: Runner) -> dict[str, Calibration]:
    """Choose formats, rotations and scales for the quantized parts and apply them; return what was measured by part."""
    configs = _quantized(parts)
    wanted = {part: configs[part.name] for part in parts if part.name in configs and configs[part.name].needs_measuring}
    if not wanted:
        raise ConfigError(
            "there is nothing to calibrate: no part has quantize='auto', rotate='auto' with int8, or scales other than 'row'"
        )
    if not runner.has_images and any(config.searches for config in wanted.values()):
        raise ConfigError("quantize='auto' compares images, and a bare model has none; name a format")
    found, images = _observed(wanted, runner)
    results = {}
    for part, config in wanted.items():
        errors = found[part]
        if config.linear == "auto":
            results[part.name] = _search(handle, part, config, errors, runner, images)
        else:
            results[part.name] = _measured(handle, part, config, errors, runner)
    return results


def _quantized(parts: Sequence[Part]) -> dict[str, Quantize]:
    """Return the config of each part that is quantized now, by its name."""
    configs = {part.name: part.configs().get(NAME) for part in parts}
    return {name: config for name, config in configs.items() if config is not None}


def _observed(wanted: Mapping[Part, Quantize], runner: Runner) -> tuple[dict[Part, Sensitivity], list[Image]]:
    """Run the jobs with these parts eager and unquantized; return what each linear had, and the images."""
    found: dict[Part, dict[str, Observation]] = {}
    with contextlib.ExitStack() as stack:
        for part, config in wanted.items():
            stack.enter_context(part.using(EAGER))
            names = [*dict.fromkeys([*candidates(part.module, config), *select(part.module, config).chosen])]
            found[part] = stack.enter_context(
                observing(part.module, names, config, runner.step, runner.measures_errors)
            )
        images = runner.run()
    results = {part: Sensitivity(observations) for part, observations in found.items()}
    for part, result in results.items():
        calibrating.remember(part.module, result)
    return results, images


def _measured(handle: Any, part: Part, config: Quantize, errors: Sensitivity, runner: Runner) -> Calibration:
    """Apply a named format with the rotations and scales that were measured, and compare it with none."""
    config = calibrating.with_measured(config, part.module, errors)
    plain, calls = _unquantized(part, runner)
    _switch(handle, part, config)
    differences = _differences(runner.run(), plain)
    taken = _times(handle, part, config, calls)
    return Calibration(config, errors, differences, taken)


def _search(
    handle: Any, part: Part, config: Quantize, errors: Sensitivity, runner: Runner, images: Sequence[Image]
) -> Calibration:
    """Return the fastest format within the budget, with the layers of large errors moved to a more accurate one."""
    budget = config.budget or BUDGET
    plain, calls = _unquantized(part, runner)
    inside: list[tuple[Quantize, tuple[Difference, ...]]] = []
    for base in calibrating.bases(part.module):
        for candidate in calibrating.ladder(config, part.module, errors, base):
            with part.using(EAGER), emulating(part.module, select(part.module, candidate).chosen):
                emulated = _differences(runner.run(), images)
            if not budget.allows(emulated):
                continue
            _switch(handle, part, candidate)
            differences = _differences(runner.run(), plain)
            if budget.allows(differences):
                inside.append((candidate, differences))
                break
    if not inside:
        return _left(handle, part, config, errors, f"no format keeps the budget of {budget}")
    timed = [(config, differences, _times(handle, part, config, calls, warns=False)) for config, differences in inside]
    best, differences, taken = min(timed, key=lambda entry: entry[2][NAME])
    if taken[NAME] > taken["without"] * (1 - trial.GAIN):
        figures = f"{best} take {taken[NAME]:.2f} ms a call, unquantized {taken['without']:.2f} ms"
        return _left(handle, part, config, errors, f"nothing saves {trial.GAIN:.0%} ({figures})", taken)
    _switch(handle, part, best)
    part.why = f"quantize='auto' chose {best}: {taken[NAME]:.2f} ms a call, unquantized {taken['without']:.2f} ms"
    return Calibration(best, errors, differences, taken)


def _left(
    handle: Any, part: Part, config: Quantize, errors: Sensitivity, why: str, taken: Mapping[str, float] | None = None
) -> Calibration:
    part.switch(handle, part.choice.with_(**{NAME: False}))
    part.why = f"quantize='auto' left it unquantized: {why}"
    return Calibration(config, errors, (), taken or {}, part.why)


def _switch(handle: Any, part: Part, config: Quantize) -> None:
    part.switch(handle, part.choice.with_(**{NAME: config}))


# The arguments of the first call of each job.
Calls = list[trial.Call]


def _unquantized(part: Part, runner: Runner) -> tuple[list[Image], Calls]:
    """Return the images with an unquantized part that runs as now otherwise, and its first call."""
    calls: Calls = []
    with part.using(part.choice.with_(**{NAME: False})), _kept_calls(part, calls):
        return runner.run(), calls


@contextlib.contextmanager
def _kept_calls(part: Part, calls: Calls) -> Iterator[None]:
    def keep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The pipeline continues with these tensors, and may write into them.
        calls.append(compat.tensors.map_tensors(torch.clone, (args, kwargs)))

    before, part.before_first = part.before_first, keep
    try:
        yield
    finally:
        part.before_first = before


def _times(handle: Any, part: Part, config: Quantize, calls: Calls, *, warns: bool = True) -> dict[str, float]:
    """Time a part quantized and not, interleaved; warn if it is slower, since a named format stays."""
    quantized, without = part.choice.with_(**{NAME: config}), part.choice.with_(**{NAME: False})
    with torch.no_grad():
        taken = trial.timed(part, [without, quantized], calls)
    _switch(handle, part, config)
    if warns:
        trial.tell_if_slower(part, NAME, taken[quantized], taken[without])
    part.why = f"{taken[quantized]:.2f} ms a call, unquantized {taken[without]:.2f} ms"
    found = {NAME: taken[quantized], "without": taken[without]}
    calibrating.remember_times(part.module, config, found)
    return found


def _differences(images: Sequence[Image], references: Sequence[Image]) -> tuple[Difference, ...]:
    return tuple(image.difference(reference) for image, reference in zip(images, references, strict=True))
