"""The ways in which a worker's pipeline can run: its default, recipes by name, and eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tritium.api import Handle
from tritium.pipelines import recipe as recipes
from tritium.serve.engine import Fidelity, Job
from tritium.serve.worker_settings import DEFAULT_RECIPE
from tritium.techniques import catalog
from tritium.techniques.choice import Choice, Off

# The way without Tritium, which fidelity "exact" stands for.
EXACT = "exact"

Choices = Mapping[str, Choice]


class Ways:
    """The choices of every way by name; switching keeps compiled code."""

    def __init__(self, handle: Handle, files: Mapping[str, str]) -> None:
        self._handle = handle
        self.default = DEFAULT_RECIPE
        found: dict[str, Choices] = {DEFAULT_RECIPE: handle.choices}
        for name, file in files.items():
            plan = recipes.load(Path(file)).plan_for(handle.pipe)
            found[name] = {part: plan.choice(part) or choice for part, choice in handle.choices.items()}
        # The names of those to compile.
        self.compiled = tuple(found)
        lossy = [name for name, file in found.items() if any(choice.is_lossy for choice in file.values())]
        self._fast = next(iter(lossy), None)
        # A lossy technique of the plan applies to eager parts too.
        without = [Off(name) for name in handle.plan.inherited() if catalog()[name].is_lossy]
        found[EXACT] = {part: Choice(how="eager", techniques=without) for part in handle.choices}
        self._choices = found
        self._current = DEFAULT_RECIPE

    @property
    def fidelities(self) -> tuple[Fidelity, ...]:
        return ("exact", "close", *(("fast",) if self._fast is not None else ()))

    def of(self, job: Job) -> str:
        """Return the name of the way for a job; a recipe by name takes precedence over a fidelity."""
        if job.recipe is not None:
            return job.recipe
        if job.fidelity == "exact":
            return EXACT
        return self._fast if job.fidelity == "fast" and self._fast is not None else self.default

    def use(self, name: str) -> None:
        if name != self._current:
            self._handle.use(self._choices[name])
            self._current = name
