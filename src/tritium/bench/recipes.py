"""Find the fastest way to run a pipeline that stays inside a budget of difference, and write it down as a recipe.

One search over all techniques: how each part runs, what is computed in fewer bits, and which steps are skipped. Losses are
measured together on images, against eager images, and the recipe is verified on jobs that the search did not see.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritium import disk, measure, quality
from tritium.api import Handle, optimize
from tritium.bench.search import engines
from tritium.bench.search.engines import EAGER
from tritium.bench.search.evaluation import Evaluator, Pace, Store
from tritium.bench.search.recording import Observed, recording_of
from tritium.bench.search.skipping import QUICK, Effort, Tables
from tritium.bench.search.tried import Result, Tried, judged
from tritium.bench.settings import Notify
from tritium.budget import Budget
from tritium.errors import ConfigError, RecipeError
from tritium.pipelines import trial
from tritium.pipelines.generation import Job, generate
from tritium.pipelines.parts import DENOISERS
from tritium.pipelines.plan import Plan
from tritium.pipelines.recipe import Recipe, fingerprint_of
from tritium.quality import Difference
from tritium.techniques.choice import Choice
from tritium.techniques.skip.config import OnOther, Skip

# What is accepted without another limit: images above it look equal to most people.
DEFAULT = Budget(min_psnr=40.0)

# Images whose outputs are recorded for proposals.
_RECORDED = 4

# A table for fewer steps than these has nothing to skip: the first ones and the last always run.
FEWEST_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and how long.

    Args:
        budget: The loss that is accepted.
        seconds: Seconds of interleaved timing for one part, and for whole images.
        held_out: Jobs that the recipe is verified on.
        quick: Generate about a quarter of the images.
        skip: Search for steps to skip.
        on_other: The reaction of the recipe to other steps, sigmas or schedulers.
        state: The file that keeps results until the recipe is written.
    """

    budget: Budget = DEFAULT
    seconds: float = trial.SECONDS
    held_out: tuple[Job, ...] = ()
    quick: bool = False
    skip: bool = True
    on_other: OnOther = "run"
    state: Path | None = None

    def __post_init__(self) -> None:
        if not self.budget.limits():
            raise ConfigError("a search needs a limit, such as min_psnr=32")
        if self.budget.max_lpips is not None and (lacking := quality.decline_lpips()) is not None:
            raise ConfigError(f"max_lpips cannot be measured: {lacking}")

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else Effort()


def tune(pipe: Any, jobs: Sequence[Job], search: Search, notify: Notify) -> Recipe:
    """Return the fastest recipe inside the budget; raise a `RecipeError` if nothing keeps it on held-out jobs."""
    if not jobs:
        raise ConfigError("nothing to tune for: give at least one prompt and one size")
    every = [*jobs, *search.held_out]
    fingerprint = fingerprint_of(pipe)
    identity = {"jobs": [job.to_dict() for job in every], "fingerprint": disk.digest(str(fingerprint.to_dict()))}
    store = Store(search.state, identity)
    # A lossy engine repeats the search for tables, and fewer steps are tried as often.
    tables = 2 * search.effort.images(len(jobs)) + search.effort.halvings * len(jobs) if search.skip else 0
    pace = Pace(notify, len(every) + 8 + tables)
    images, observed, calls = engines.references(pipe, every, min(_RECORDED, len(jobs)), pace)
    figures: dict[str, Any] = {
        "jobs": [job.to_dict() for job in jobs],
        "held_out_jobs": [job.to_dict() for job in search.held_out],
        "budget": {**search.budget.limits(), "quantile": search.budget.quantile},
        "schedule": _schedule(observed[0]),
    }
    eager_seconds = statistics.median(image.seconds for image in images[: len(jobs)])
    # All parts start eager and are switched one at a time.
    with optimize(pipe, Plan(components=dict.fromkeys(calls, "eager"), progress=False)) as handle:
        evaluator = Evaluator(handle, every, images, store, pace, perceptual=search.budget.max_lpips is not None)
        base, figures["parts"] = engines.lossless(evaluator, calls, search.seconds)
        tuning = _Tuning(evaluator, search, len(jobs), base, figures)
        tuning.settle_parts()
        tuning.try_lossy(calls, observed)
        chosen, held = tuning.verified()
        differences, held_out = list(chosen.differences), [result.difference for result in held]
        choices = _with_loss(chosen.choices, differences, held_out, search)
        pace.step("timing whole images", 1.0)
        figures["images"] = _whole(handle, jobs, choices, engines.plain_compile(handle, calls), search.seconds)
    figures["tried"] = [
        replace(entry, chosen=entry is chosen, why=_why(entry, chosen)).to_dict(eager_seconds) for entry in tuning.tried
    ]
    figures["eager_seconds"] = eager_seconds
    figures["per_job"] = [found.to_dict() for found in differences]
    figures["held_out"] = [found.to_dict() for found in held_out]
    figures["difference"] = quality.worst(differences).to_dict()
    figures["generated"] = {"references": len(every), "candidates": evaluator.images}
    return Recipe(choices=choices, figures=figures, fingerprint=fingerprint)


def _schedule(observed: Observed) -> dict[str, Any]:
    return {
        "scheduler": observed.scheduler,
        "steps": observed.steps,
        "sigmas": list(observed.sigmas),
        "calls_per_step": observed.branches,
    }


@dataclass
class _Tuning:
    """The candidates of one search so far, in the order in which they were tried."""

    evaluator: Evaluator
    search: Search
    # The first jobs of the evaluator; the others are held out.
    jobs: int
    # The way that every part runs without lossy techniques.
    base: dict[str, Choice]
    figures: dict[str, Any]
    tried: list[Tried] = field(default_factory=list)

    def settle_parts(self) -> None:
        """Make parts eager, the least faithful first, until images are inside the budget."""
        base, budget = self.base, self.search.budget
        while True:
            compiled = [name for name, choice in base.items() if choice != EAGER]
            results = self.evaluator.run(base, range(self.jobs), "compiled parts")
            found = Tried.of("compiled parts" if compiled else "eager", "engine", dict(base), results, budget)
            if found.inside or not compiled:
                # Eager images are the reference.
                self.tried.append(replace(found, inside=True))
                return
            alone = {name: self._slack_of({**dict.fromkeys(base, EAGER), name: base[name]}, name) for name in compiled}
            worst = min(alone, key=alone.__getitem__)
            base[worst] = EAGER
            psnr = quality.worst(found.differences).psnr
            why = f"left alone: images had a PSNR of {psnr:.1f} dB with it; asked for was {budget}"
            self.figures["parts"][worst]["why"] = why

    def _slack_of(self, choices: dict[str, Choice], what: str) -> float:
        results = self.evaluator.run(choices, range(self.jobs), what)
        return self.search.budget.slack_of([result.difference for result in results])

    def try_lossy(self, calls: dict[str, list[trial.Call]], observed: Sequence[Observed]) -> None:
        """Try lossy techniques, tables, both together, and fewer steps."""
        tables, declined = self._tables(observed)
        sensitivity = None
        found: dict[str, Any] = {"declined": declined}
        self.figures["skip"] = found
        if tables is not None:
            sensitivity = tables.sensitivity(self.base)
            found["sensitivity"] = list(sensitivity)
            best = tables.search(self.base, "skip", sensitivity)
            found["runs"] = None if best is None else best.name
            self.tried.extend(tables.tried)
            self._try_fewer_steps(tables, best)
        seconds, budget = self.search.seconds, self.search.budget
        for name, choices in engines.lossy(self.evaluator, self.base, calls, self.figures["parts"], seconds):
            results = self.evaluator.run(choices, range(self.jobs), name)
            engine = Tried.of(name, "engine", choices, results, budget)
            self.tried.append(engine)
            if engine.inside and tables is not None:
                tables.tried = []
                # The losses of both are measured together; what the steps tolerate is known.
                tables.search(choices, f"{name}, skip", sensitivity)
                self.tried.extend(tables.tried)

    def _tables(self, observed: Sequence[Observed]) -> tuple[Tables | None, str]:
        """Return the search for tables, or None and why there is none."""
        first, search = observed[0], self.search
        if not search.skip:
            return None, "it was not asked for"
        if first.declined:
            return None, first.declined
        if first.steps < FEWEST_STEPS:
            return None, f"images of {first.steps} steps leave nothing to skip; {FEWEST_STEPS} steps or more do"
        recording = recording_of(list(observed[: min(_RECORDED, self.jobs)]))
        schedules = {(one.steps, one.sigmas) for one in observed}
        if recording is None or len({steps for steps, _ in schedules}) > 1:
            return None, "the jobs have different steps or calls of the denoiser; tune for one schedule at a time"
        parts = [name for name in DENOISERS if name in self.evaluator.handle.choices]
        fields: dict[str, object] = {"scheduler": first.scheduler, "on_other": search.on_other}
        if len(schedules) == 1:
            # Sizes can change the sigmas of a schedule; a table for several of them is not bound to one.
            fields["sigmas"] = first.sigmas
        return Tables(self.evaluator, search.budget, recording, parts, self.jobs, search.effort, fields), ""

    def _try_fewer_steps(self, tables: Tables, best: Tried | None) -> None:
        """Try to keep the budget by fewer steps of the scheduler, also with the noise levels of the best table."""
        steps = tables.recording.steps
        least, most = max(2, steps // 7), steps - 1
        for _ in range(tables.effort.halvings):
            if least <= most:
                middle = (least + most) // 2
                is_inside = self._try_steps(middle, f"{middle} steps", tables.effort)
                least, most = (least, middle - 1) if is_inside else (middle + 1, most)
        takes_sigmas = "sigmas" in inspect.signature(type(self.evaluator.handle.pipe).__call__).parameters
        if best is not None and takes_sigmas:
            row = tables.table_of(best).actions(steps)[0]
            levels = [1 - step / steps for step, letter in enumerate(row) if letter == "R"]
            extra = {**self.evaluator.jobs[0].extra, "sigmas": levels}
            what = f"{len(levels)} steps at the noise levels of the table"
            self._try_steps(len(levels), what, tables.effort, extra=extra)

    def _try_steps(self, number: int, what: str, effort: Effort, **changes: Any) -> bool:
        """Return True if images of so many steps are inside the budget."""
        few, budget = range(min(effort.few_jobs, self.jobs)), self.search.budget
        results = self.evaluator.run(self.base, few, what, steps=number, **changes)
        is_promising = judged(budget, [result.difference for result in results])[0]
        if is_promising:
            results = self.evaluator.run(self.base, range(self.jobs), what, steps=number, **changes)
        self.tried.append(Tried.of(what, "fewer steps", self.base, results, budget, complete=is_promising))
        return self.tried[-1].inside

    def verified(self) -> tuple[Tried, list[Result]]:
        """Return the fastest way inside the budget that also keeps it on held-out jobs, and its results there."""
        ways = [entry for entry in self.tried if entry.inside and entry.complete and entry.kind != "fewer steps"]
        budget, places, failed = self.search.budget, range(self.jobs, len(self.evaluator.jobs)), []
        for entry in sorted(ways, key=lambda entry: entry.seconds):
            results = self.evaluator.run(entry.choices, places, "verifying on held-out jobs")
            differences = [result.difference for result in results]
            is_eager = all(choice == EAGER for choice in entry.choices.values())
            if is_eager or not differences or budget.allows(differences):
                return entry, results
            failed.append(f"{entry.name} ({judged(budget, differences)[1]})")
        raise RecipeError(
            f"no recipe is written: on held-out jobs nothing that was faster kept {budget}: {'; '.join(failed)}"
        )


def _why(entry: Tried, chosen: Tried) -> str:
    if entry is chosen:
        return f"the fastest inside the budget; {entry.why}"
    if not entry.inside:
        return entry.why
    if entry.kind == "fewer steps":
        return "a competitor: the caller sets the number of steps, a recipe does not"
    return "slower than the chosen one" if entry.seconds >= chosen.seconds else "outside of the budget on held-out jobs"


def _with_loss(
    choices: Mapping[str, Choice], found: Sequence[Difference], held_out: Sequence[Difference], search: Search
) -> dict[str, Choice]:
    """Return choices whose tables say with what loss they were found."""
    worst = sorted(one.psnr for one in found)
    loss = f"found with {search.budget}: PSNR {worst[0]:.1f} to {worst[-1]:.1f} dB in {len(found)} jobs"
    if held_out:
        loss += f", {min(one.psnr for one in held_out):.1f} dB at least in {len(held_out)} held-out jobs"
    return {
        name: choice if (skip := choice.get(Skip)) is None else choice.with_(skip=replace(skip, loss=loss))
        for name, choice in choices.items()
    }


def _whole(
    handle: Handle, jobs: Sequence[Job], chosen: Mapping[str, Choice], compiled: Mapping[str, Choice], seconds: float
) -> dict[str, Any]:
    """Measure seconds and memory of all jobs: eager, with torch.compile and as chosen, interleaved."""
    ways: dict[str, Mapping[str, Choice]] = {"eager": dict.fromkeys(handle.choices, EAGER), "recipe": chosen}
    if any(choice.how == "inductor" for choice in compiled.values()):
        ways["torch.compile"] = compiled

    def generate_all() -> None:
        for job in jobs:
            generate(handle.pipe, job)

    device_type = handle.pipe.device.type
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
    ours = timings["recipe"].median_ms
    figures["ratio"] = timings["eager"].median_ms / ours
    figures["ratio_to_compile"] = timings["torch.compile"].median_ms / ours if "torch.compile" in timings else None
    return figures
