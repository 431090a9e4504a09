"""The ways in which a worker's pipeline can run: its default, recipes by name, and eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritium.api import Handle
from tritium.errors import ConfigError
from tritium.pipelines import recipe as recipes
from tritium.serve.engine import Fidelity, Job
from tritium.serve.worker_settings import DEFAULT_RECIPE
from tritium.techniques import catalog
from tritium.techniques.choice import Choice, Off, name_of
from tritium.techniques.skip.config import Skip

# The way without Tritium, which fidelity "exact" stands for.
EXACT = "exact"
# The way without recipes, where the default recipe is lossy.
CLOSE = "close"

Choices = Mapping[str, Choice]


class Ways:
    """The choices of every way by name; switching keeps compiled code."""

    def __init__(self, handle: Handle, files: Mapping[str, str]) -> None:
        self._handle = handle
        self.default = DEFAULT_RECIPE
        found: dict[str, Choices] = {DEFAULT_RECIPE: handle.choices}
        for name, file in files.items():
            if name in (EXACT, CLOSE):
                raise ConfigError(f"a recipe cannot be named {name!r}, which is a fidelity; choose another name")
            plan = recipes.load(Path(file)).plan_for(handle.pipe)
            found[name] = {part: plan.choice(part) or choice for part, choice in handle.choices.items()}
        lossy = [name for name, choices in found.items() if any(map(_is_lossy, choices.values()))]
        self._fast = next(iter(lossy), None)
        self._close = DEFAULT_RECIPE
        if DEFAULT_RECIPE in lossy:
            self._close = CLOSE
            found[CLOSE] = handle.choices
        # The names of those to compile.
        self.compiled = tuple(found)
        # A lossy technique of the plan applies to eager parts too.
        without = [
            Off(name_of("Plan", config)) for config in handle.plan.inherited().values() if _changes_images(config)
        ]
        found[EXACT] = {part: Choice(how="eager", techniques=without) for part in handle.choices}
        self._choices = found
        # A recipe may be the default one, and the handle does not run it yet.
        self._current: str | None = None

    @property
    def fidelities(self) -> tuple[Fidelity, ...]:
        return ("exact", "close", *(("fast",) if self._fast is not None else ()))

    def of(self, job: Job) -> str:
        """Return the name of the way for a job; a recipe by name takes precedence over a fidelity."""
        if job.recipe is not None:
            return job.recipe
        if job.fidelity == "exact":
            return EXACT
        if job.fidelity == "close":
            return self._close
        return self._fast if job.fidelity == "fast" and self._fast is not None else self.default

    def use(self, name: str) -> None:
        if name != self._current:
            self._handle.use(self._choices[name])
            self._current = name


def _is_lossy(choice: Choice) -> bool:
    return any(map(_changes_images, choice.configs().values()))


def _changes_images(config: Any) -> bool:
    """Return True for a technique that changes images; skipping is not `is_lossy`, which is about the time of one call."""
    return isinstance(config, Skip) or catalog()[name_of("Plan", config)].is_lossy or getattr(config, "is_lossy", False)
