"""Find the fastest way to run a pipeline that stays inside a budget of difference, and write it down as a recipe."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium import measure, quality
from tritium.api import Handle, optimize
from tritium.bench.bisect import copied
from tritium.bench.settings import Notify
from tritium.errors import ConfigError, PipelineError
from tritium.pipelines import hooks, trial
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.plan import Plan
from tritium.pipelines.recipe import Recipe, fingerprint_of
from tritium.techniques.choice import Choice


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits for a recipe."""

    min_psnr: float = 40.0
    # Seconds of interleaved timing for one part, and for whole images.
    seconds: float = trial.SECONDS

    def __post_init__(self) -> None:
        if math.isnan(self.min_psnr):
            raise ConfigError(f"min_psnr must be a number, got {self.min_psnr}")


def tune(pipe: Any, jobs: Sequence[Job], budget: Budget, notify: Notify) -> Recipe:
    """Try every choice for each part, on real calls of all jobs, and keep the fastest inside the budget."""
    if not jobs:
        raise ConfigError("nothing to tune for: give at least one prompt and one size")
    notify("eager images", 0.0)
    reference, calls = _eager(pipe, jobs)
    figures: dict[str, Any] = {"parts": {}, "jobs": [job.to_dict() for job in jobs]}
    chosen: dict[str, Choice] = {}
    # All parts start eager and are switched one at a time.
    with optimize(pipe, Plan(components=dict.fromkeys(calls, "eager"), progress=False)) as handle:
        names = list(handle.choices)
        for place, name in enumerate(names):
            part = handle.part(name)
            chosen[name] = Choice(how="eager")
            if not calls.get(name) or not part.spec.blocks:
                continue
            try:
                hooks.check(part.spec)
            except PipelineError as error:
                figures["parts"][name] = {"milliseconds": {}, "why": f"left alone: {error}"}
                continue
            notify(f"{name}: {', '.join(map(str, trial.ways(part)))}", 0.1 + 0.6 * place / len(names))
            # As in pipelines: tensors made in inference mode would compile every part again.
            with torch.no_grad():
                trial.decide(part, calls[name], seconds=budget.seconds)
            chosen[name] = part.choice
            figures["parts"][name] = {"milliseconds": part.measured, "why": part.why}
        notify("comparing images", 0.75)
        found = _inside(handle, pipe, jobs, reference, chosen, budget.min_psnr, figures)
        notify("timing whole images", 0.9)
        figures["images"] = _whole(handle, pipe, jobs, chosen, budget.seconds)
    figures["difference"] = found.to_dict()
    return Recipe(choices=chosen, figures=figures, fingerprint=fingerprint_of(pipe))


def _eager(pipe: Any, jobs: Sequence[Job]) -> tuple[list[Image], dict[str, list[trial.Call]]]:
    """Return eager images, and one call of every part in every job."""
    modules = [name for name, value in pipe.components.items() if isinstance(value, torch.nn.Module)]
    calls: dict[str, list[trial.Call]] = {}
    images = []
    with optimize(pipe, Plan(progress=False, components=dict.fromkeys(modules, "eager"))) as handle:
        for job in jobs:
            for name in handle.choices:
                handle.part(name).before_first = functools.partial(_keep, calls.setdefault(name, []))
            images.append(generate(pipe, job))
    return images, calls


def _keep(kept: list[trial.Call], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The pipeline continues with these tensors, and may write into them.
    kept.append(copied((args, kwargs)))


def _inside(
    handle: Handle,
    pipe: Any,
    jobs: Sequence[Job],
    reference: Sequence[Image],
    chosen: dict[str, Choice],
    min_psnr: float,
    figures: dict[str, Any],
) -> quality.Difference:
    """Make parts eager, the least faithful first, until images are inside the budget."""
    while True:
        found = _difference(handle, pipe, jobs, reference, chosen)
        compiled = [name for name, choice in chosen.items() if choice != Choice(how="eager")]
        if found.psnr >= min_psnr or not compiled:
            return found
        alone = {name: _difference(handle, pipe, jobs, reference, {name: chosen[name]}).psnr for name in compiled}
        worst = min(alone, key=alone.__getitem__)
        chosen[worst] = Choice(how="eager")
        figures["parts"][worst]["why"] = (
            f"left alone: images had a PSNR of {found.psnr:.1f} dB with it, and {min_psnr:g} dB were asked for"
        )


def _difference(
    handle: Handle, pipe: Any, jobs: Sequence[Job], reference: Sequence[Image], chosen: dict[str, Choice]
) -> quality.Difference:
    handle.use({name: chosen.get(name, Choice(how="eager")) for name in handle.choices})
    pairs = zip(jobs, reference, strict=True)
    return quality.worst([generate(pipe, job).difference(expected) for job, expected in pairs])


def _whole(handle: Handle, pipe: Any, jobs: Sequence[Job], chosen: dict[str, Choice], seconds: float) -> dict[str, Any]:
    """Measure seconds and memory of all jobs, eager and as chosen, interleaved."""
    ways = {"eager": dict.fromkeys(handle.choices, Choice(how="eager")), "recipe": chosen}

    def generate_all() -> None:
        for job in jobs:
            generate(pipe, job)

    device_type = pipe.device.type
    timings = measure.interleave(
        dict.fromkeys(ways, generate_all),
        device_type,
        seconds=seconds,
        warmup=1,
        prepare=lambda name: handle.use(ways[name]),
    )
    figures: dict[str, Any] = {}
    for name, choices in ways.items():
        handle.use(choices)
        peak = measure.peak_memory(generate_all, device_type)
        figures[name] = {"seconds": timings[name].median_ms / 1e3 / len(jobs), "peak_memory_bytes": peak}
    return {**figures, "ratio": timings["eager"].median_ms / timings["recipe"].median_ms}
