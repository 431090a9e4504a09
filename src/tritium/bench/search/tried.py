"""What a search tried: one row for each way of running, with speed, loss, and the reason for keeping it or not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tritium.budget import Budget
from tritium.quality import Difference
from tritium.techniques.choice import Choice

# `fewer steps` is a competitor: a pipeline's call sets its steps, so no recipe can hold it.
Kind = Literal["engine", "skip", "fewer steps"]


@dataclass(frozen=True)
class Result:
    """One job with one candidate."""

    difference: Difference
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One way of running all jobs, or some of them."""

    name: str
    kind: Kind
    choices: Mapping[str, Choice] = field(default_factory=dict)
    # Of an image, the median of the jobs.
    seconds: float
    differences: tuple[Difference, ...]
    # True if it was run on all jobs.
    complete: bool
    inside: bool
    chosen: bool = False
    why: str = ""

    @classmethod
    def of(
        cls,
        name: str,
        kind: Kind,
        choices: Mapping[str, Choice],
        results: Sequence[Result],
        budget: Budget,
        *,
        complete: bool = True,
    ) -> Tried:
        differences = tuple(result.difference for result in results)
        inside, why = judged(budget, differences)
        return cls(
            name=name,
            kind=kind,
            choices=choices,
            seconds=statistics.median(result.seconds for result in results),
            differences=differences,
            complete=complete,
            inside=inside and complete,
            why=why,
        )

    def to_dict(self, eager_seconds: float) -> dict[str, Any]:
        def figures(values: Sequence[float | None]) -> dict[str, float | None]:
            known = sorted(value for value in values if value is not None)
            finite = [value for value in known if abs(value) != float("inf")]
            if not known:
                return {"median": None, "worst": None}
            middle = statistics.median(known)
            return {
                "median": middle if abs(middle) != float("inf") else None,
                "least": finite[0] if finite else None,
                "largest": finite[-1] if finite else None,
            }

        return {
            "name": self.name,
            "kind": self.kind,
            "seconds": self.seconds,
            "speed": eager_seconds / self.seconds,
            "jobs": len(self.differences),
            "psnr": figures([found.psnr for found in self.differences]),
            "ssim": figures([found.ssim for found in self.differences]),
            "latent_l2": figures([found.latent_l2 for found in self.differences]),
            "lpips": figures([found.lpips for found in self.differences]),
            "inside": self.inside,
            "kept": self.chosen,
            "why": self.why,
        }


def judged(budget: Budget, differences: Sequence[Difference]) -> tuple[bool, str]:
    """Return whether differences are inside a budget, and the words for the table."""
    slack = budget.slack_of(differences)
    needed = budget.jobs_inside(len(differences))
    if slack >= 0:
        return True, f"inside the budget ({needed} of {len(differences)} jobs)"
    inside = sum(budget.slack(found) >= 0 for found in differences)
    return False, f"outside of the budget: {inside} of {len(differences)} jobs keep {budget}"
