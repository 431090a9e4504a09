"""Generate the same images eagerly and optimized, and compare their differences with thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import compat, device
from tritium.api import Handle, optimize
from tritium.bench import quality
from tritium.bench.generation import Image, Job, generate
from tritium.bench.locate import Location, locate
from tritium.bench.quality import Difference
from tritium.bench.settings import Notify
from tritium.errors import ConfigError
from tritium.pipelines import recipe
from tritium.pipelines.plan import Plan
from tritium.report.ledger import LEDGER

# Images above this look equal to most people; a compiled float32 pipeline is far above.
MIN_PSNR = 40.0


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds for an image; None means no threshold."""

    min_psnr: float | None = MIN_PSNR
    min_ssim: float | None = None
    max_difference: float | None = None
    max_latent_l2: float | None = None
    max_lpips: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.__dict__.items():
            if limit is not None and math.isnan(limit):
                raise ConfigError(f"{name} must be a number, got {limit}")
        if self.min_ssim is not None and self.min_ssim > 1:
            raise ConfigError(f"min_ssim {self.min_ssim:g} cannot be reached: equal images have 1")
        for name in ("max_difference", "max_latent_l2", "max_lpips"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ConfigError(f"{name} {limit:g} cannot be reached: equal images have 0")
        obstacle = quality.lpips_obstacle() if self.max_lpips is not None else None
        if obstacle is not None:
            raise ConfigError(f"LPIPS cannot be measured here: {obstacle}")

    def broken_by(self, found: Difference) -> list[str]:
        """Name the thresholds that a difference exceeds."""
        limits = {
            "psnr": self.min_psnr,
            "ssim": self.min_ssim,
            "largest": self.max_difference,
            "latent_l2": self.max_latent_l2,
            "lpips": self.max_lpips,
        }
        return quality.within(found, {name: limit for name, limit in limits.items() if limit is not None})

    def to_dict(self) -> dict[str, float | str]:
        """Return the thresholds that are set; `inf` as a string, because JSON has no infinity."""
        return {
            name: limit if math.isfinite(limit) else str(limit)
            for name, limit in self.__dict__.items()
            if limit is not None
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One job."""

    job: Job
    # Of the image.
    width: int
    height: int
    difference: Difference
    broken: tuple[str, ...]
    eager_seconds: float
    # Includes compilation if this job was the first to need it.
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.job.to_dict(),
            "width": self.width,
            "height": self.height,
            **self.difference.to_dict(),
            "broken": list(self.broken),
            "eager_seconds": self.eager_seconds,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The verdict and the figures behind it."""

    pipeline: str
    device_type: str
    # How each part ran.
    choices: dict[str, str]
    thresholds: Thresholds
    rows: tuple[Row, ...]
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
            "located": None if self.location is None else self.location.to_dict(),
            "device": device.describe(self.device_type).to_dict(),
            "versions": compat.versions.versions(),
        }


def verify(
    pipe: Any,
    jobs: Sequence[Job],
    thresholds: Thresholds,
    notify: Notify,
    plan: Plan | str | Path | None = None,
    *,
    accept_differences: bool = False,
    find_cause: bool = False,
) -> Verified:
    """Run all jobs twice. With `find_cause`, search the worst one for the module, fusion and provider at fault."""
    if not jobs:
        raise ConfigError("nothing to verify: give at least one prompt, size and seed")
    if isinstance(plan, (str, Path)):
        plan = recipe.load(Path(plan)).plan_for(pipe, accept_differences=accept_differences)
    drawing = 0.6 if find_cause else 1.0
    steps = _Steps(notify)
    eager = [steps.generate(pipe, job, "eager", drawing * 0.5 * n / len(jobs)) for n, job in enumerate(jobs)]
    # This function reports progress, so parts must not report it again.
    with optimize(pipe, (plan or Plan()).with_(progress=False)) as handle, LEDGER.observed(steps.compiling):
        rows = []
        for n, (job, expected) in enumerate(zip(jobs, eager, strict=True)):
            image = steps.generate(pipe, job, "accelerated", drawing * (0.5 + 0.5 * n / len(jobs)))
            rows.append(_row(job, image, expected, thresholds))
        choices = {name: str(choice) for name, choice in handle.choices.items()}
        location = _locate(handle, rows, eager, thresholds, steps.after(drawing)) if find_cause else None
    return Verified(
        pipeline=type(pipe).__name__,
        device_type=pipe.device.type,
        choices=choices,
        thresholds=thresholds,
        rows=tuple(rows),
        location=location,
    )


class _Steps:
    """Reports the current job and the compilations inside it."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._share = 0.0

    def tell(self, what: str, share: float) -> None:
        self._share = share
        self._notify(what, share)

    def generate(self, pipe: Any, job: Job, how: str, share: float) -> Image:
        self.tell(f"{how}: {job.prompt!r}, seed {job.seed}", share)
        return generate(pipe, job)

    def compiling(self, function: str, seconds: float | None) -> None:
        if seconds is None:
            self._notify(f"compiling {function}", self._share)

    def after(self, begin: float) -> Notify:
        """Return a reporter for work that begins at this share."""
        return lambda what, share: self.tell(what, begin + (1 - begin) * share)


def _row(job: Job, image: Image, expected: Image, thresholds: Thresholds) -> Row:
    found = image.difference(expected, perceptual=True)
    height, width = expected.pixels.shape[-2:]
    return Row(
        job=job,
        width=width,
        height=height,
        difference=found,
        broken=tuple(thresholds.broken_by(found)),
        eager_seconds=expected.seconds,
        seconds=image.seconds,
    )


def _locate(
    handle: Handle, rows: Sequence[Row], eager: Sequence[Image], thresholds: Thresholds, notify: Notify
) -> Location:
    """Search the job with the worst image."""
    row, expected = min(zip(rows, eager, strict=True), key=lambda pair: (not pair[0].broken, pair[0].difference.psnr))

    def is_past() -> bool:
        return bool(thresholds.broken_by(generate(handle.pipe, row.job).difference(expected, perceptual=True)))

    return locate(handle, row.job, notify, is_past if row.broken else None)
