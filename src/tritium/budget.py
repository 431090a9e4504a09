"""The loss that a user accepts, as limits on the difference to reference images and a share of jobs that must keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tritium.errors import ConfigError


class Figures(Protocol):
    """The difference of an image to its reference; None for a figure that was not measured."""

    @property
    def psnr(self) -> float: ...
    @property
    def ssim(self) -> float: ...
    @property
    def lpips(self) -> float | None: ...
    @property
    def latent_l2(self) -> float | None: ...
    @property
    def not_numbers(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on the difference between images and their references.

    Args:
        min_psnr: The least PSNR in decibels.
        max_lpips: The largest LPIPS; needs the package `lpips` and its weights.
        min_ssim: The least SSIM, at most 1.
        max_latent_l2: The largest relative L2 error of the latents before decoding.
        quantile: The share of jobs that must keep every limit; by default all but one of eight.

    >>> Budget(min_psnr=32).jobs_inside(8)
    7
    """

    min_psnr: float | None = None
    max_lpips: float | None = None
    min_ssim: float | None = None
    max_latent_l2: float | None = None
    quantile: float = 7 / 8

    def __post_init__(self) -> None:
        for name, limit in self.limits().items():
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
                raise ConfigError(f"{name} is a number, got {limit!r}")
            if limit < 0 and name != "min_psnr":
                raise ConfigError(f"{name} is 0 or more, got {limit!r}")
        if self.min_ssim is not None and self.min_ssim > 1:
            raise ConfigError(f"min_ssim is at most 1, the SSIM of equal images; got {self.min_ssim!r}")
        if not 0 < self.quantile <= 1:
            raise ConfigError(f"quantile is a share above 0 and at most 1, got {self.quantile!r}")

    def __str__(self) -> str:
        names = {"min_psnr": "PSNR >= {:g} dB", "max_lpips": "LPIPS <= {:g}", "min_ssim": "SSIM >= {:g}"}
        names["max_latent_l2"] = "latent L2 <= {:g}"
        return ", ".join(names[name].format(limit) for name, limit in self.limits().items()) or "no limit"

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name."""
        names = ("min_psnr", "max_lpips", "min_ssim", "max_latent_l2")
        return {name: limit for name in names if (limit := getattr(self, name)) is not None}

    def slack(self, found: Figures) -> float:
        """Return the distance to the nearest limit as a share of it; negative outside of the budget."""
        if found.not_numbers:
            return -math.inf
        slacks = []
        for name, limit in self.limits().items():
            value = getattr(found, name.split("_", 1)[1])
            if value is None:
                raise ConfigError(f"{name} cannot be checked: images were compared without it")
            # An infinite PSNR is that of equal images.
            distance = value - limit if name.startswith("min_") else limit - value
            slacks.append(distance / max(abs(limit), 1e-9) if math.isfinite(distance) else math.inf)
        return min(slacks, default=math.inf)

    def jobs_inside(self, jobs: int) -> int:
        """Return how many of this many jobs must keep every limit."""
        return math.ceil(self.quantile * jobs - 1e-9)

    def slack_of(self, found: Sequence[Figures]) -> float:
        """Return the slack of the worst job that counts: the quantile over several jobs."""
        slacks = sorted(map(self.slack, found), reverse=True)
        return slacks[self.jobs_inside(len(slacks)) - 1]

    def allows(self, found: Sequence[Figures]) -> bool:
        """Return True if enough of these jobs keep every limit."""
        return self.slack_of(found) >= 0
