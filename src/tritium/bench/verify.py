"""Generate the same images eagerly and optimized, and compare their differences with thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritium import compat, device, quality
from tritium.api import Handle, optimize
from tritium.bench.locate import Location, locate
from tritium.bench.settings import Notify
from tritium.errors import ConfigError
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.plan import Plan
from tritium.pipelines.recipe import Recipe
from tritium.quality import Difference
from tritium.report.ledger import LEDGER

# Images above this look equal to most people; a compiled float32 pipeline is far above.
MIN_PSNR = 40.0

# What a median image keeps with linears in 8 bits, whose loss is larger than that of another order of sums.
MIN_PSNR_QUANTIZED = 33.0


# The figure that each threshold limits.
_FIGURES = {
    "min_psnr": "psnr",
    "min_ssim": "ssim",
    "max_difference": "largest",
    "max_latent_l2": "latent_l2",
    "max_lpips": "lpips",
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds for an image; None means no threshold."""

    min_psnr: float | None = MIN_PSNR
    min_ssim: float | None = None
    max_difference: float | None = None
    max_latent_l2: float | None = None
    max_lpips: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.given.items():
            if math.isnan(limit):
                raise ConfigError(f"{name} must be a number, got {limit}")
            equal = {"min_psnr": math.inf, "min_ssim": 1.0}.get(name, 0.0)
            if not _is_within(name, equal, limit):
                raise ConfigError(f"{name} {limit:g} cannot be reached: equal images have {equal:g}")
        reason = quality.decline_lpips() if self.max_lpips is not None else None
        if reason is not None:
            raise ConfigError(f"LPIPS cannot be measured here: {reason}")

    @property
    def given(self) -> dict[str, float]:
        return {name: limit for name, limit in self.__dict__.items() if limit is not None}

    def broken_by(self, found: Difference) -> list[str]:
        """Name the thresholds that a difference exceeds."""
        broken = [f"{found.not_numbers} values are no numbers"] if found.not_numbers else []
        for name, limit in self.given.items():
            figure = _FIGURES[name]
            value = getattr(found, figure)
            if value is None:
                broken.append(f"{figure} was not measured, and its limit is {limit:g}")
            elif not _is_within(name, value, limit):
                broken.append(f"{figure} {value:.4g} is past {limit:g}")
        return broken

    def to_dict(self) -> dict[str, float | str]:
        """Return the thresholds that are set; `inf` as a string, because JSON has no infinity."""
        return {name: limit if math.isfinite(limit) else str(limit) for name, limit in self.given.items()}


def _is_within(name: str, value: float, limit: float) -> bool:
    # Comparisons with NaN are False, so NaN is past every limit.
    return value >= limit if name.startswith("min_") else value <= limit


@dataclass(frozen=True)
class Row:
    job: Job
    # Of the image.
    width: int
    height: int
    difference: Difference
    broken: list[str]
    eager_seconds: float
    # Includes compilation if this job was the first to need it.
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        fields = {**self.__dict__, **self.difference.to_dict(), "job": self.job.to_dict()}
        del fields["difference"]
        return fields


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The verdict and the figures behind it."""

    pipeline: str
    device_type: str
    # How each part ran.
    choices: dict[str, str]
    thresholds: Thresholds
    rows: tuple[Row, ...]
    # What techniques say about the parts that they changed.
    notes: tuple[str, ...] = ()
    location: Location | None = None

    @property
    def worst(self) -> Difference:
        return quality.worst([row.difference for row in self.rows])

    @property
    def broken(self) -> list[str]:
        """Name the thresholds that the worst figures exceed."""
        return self.thresholds.broken_by(self.worst)

    @property
    def passed(self) -> bool:
        return not self.broken

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "broken": self.broken,
            "worst": self.worst.to_dict(),
            "thresholds": self.thresholds.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "pipeline": self.pipeline,
            "choices": self.choices,
            "notes": list(self.notes),
            "located": None if self.location is None else self.location.to_dict(),
            "device": device.describe(self.device_type).to_dict(),
            "versions": compat.versions.versions(),
        }


def default_psnr(plan: Plan | Recipe | None) -> float:
    """Return the threshold for images of a plan if the user gives none."""
    return MIN_PSNR_QUANTIZED if isinstance(plan, Plan) and plan.names("quantize") else MIN_PSNR


def verify(
    pipe: Any,
    jobs: Sequence[Job],
    thresholds: Thresholds,
    notify: Notify,
    plan: Plan | Recipe | None = None,
    *,
    accept_differences: bool = False,
    find_cause: bool = False,
) -> Verified:
    """Run all jobs twice. With `find_cause`, search the worst one for the module, fusion and provider at fault."""
    if not jobs:
        raise ConfigError("nothing to verify: give at least one prompt, size and seed")
    if isinstance(plan, Recipe):
        plan = plan.plan_for(pipe, accept_differences=accept_differences)
    share_of_images = 0.6 if find_cause else 1.0
    reached = 0.0

    def tell(what: str, share: float) -> None:
        nonlocal reached
        reached = share
        notify(what, share)

    def compiling(function: str, seconds: float | None) -> None:
        if seconds is None:
            notify(f"compiling {function}", reached)

    def searching(what: str, share: float) -> None:
        tell(what, share_of_images + (1 - share_of_images) * share)

    def generated(how: str, begin: float) -> list[Image]:
        found = []
        for n, job in enumerate(jobs):
            tell(f"{how}: {job.prompt!r}, seed {job.seed}", share_of_images * (begin + 0.5 * n / len(jobs)))
            found.append(generate(pipe, job))
        return found

    eager = generated("eager", 0.0)
    # This function reports progress, so parts must not report it again.
    with optimize(pipe, (plan or Plan()).with_(progress=False)) as handle, LEDGER.observed(compiling):
        images = generated("accelerated", 0.5)
        rows = []
        for job, image, expected in zip(jobs, images, eager, strict=True):
            found = image.difference(expected, perceptual=True)
            height, width = expected.pixels.shape[-2:]
            seconds = expected.seconds, image.seconds
            rows.append(Row(job, width, height, found, thresholds.broken_by(found), *seconds))
        return Verified(
            pipeline=type(pipe).__name__,
            device_type=pipe.device.type,
            choices={name: str(choice) for name, choice in handle.choices.items()},
            thresholds=thresholds,
            rows=tuple(rows),
            notes=_notes(handle),
            location=_locate(handle, rows, eager, thresholds, searching) if find_cause else None,
        )


def _notes(handle: Handle) -> tuple[str, ...]:
    noted = {name: handle.part(name).technique_notes.values() for name in handle.choices}
    return tuple(f"{name}: {note.text}" for name, notes in noted.items() for note in notes if note.text)


def _locate(
    handle: Handle, rows: Sequence[Row], eager: Sequence[Image], thresholds: Thresholds, notify: Notify
) -> Location:
    """Search the job with the worst image."""
    row, expected = min(zip(rows, eager, strict=True), key=lambda pair: (not pair[0].broken, pair[0].difference.psnr))

    def is_past() -> bool:
        return bool(thresholds.broken_by(generate(handle.pipe, row.job).difference(expected, perceptual=True)))

    return locate(handle, row.job, notify, is_past if row.broken else None)
