"""The front door: `handle = tritium.optimize(pipe)`.

Every part of the pipeline gets what the plan says; the pipeline itself stays the object it was, and `handle.remove()` gives it back
as it was.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from tritium import compat
from tritium.compiler import artifacts as compiled_files
from tritium.compiler import collector
from tritium.compiler.explain import explain
from tritium.errors import ArtifactError, ConfigError, PipelineError, ReportError, nearest
from tritium.pipelines import account, claims, hooks, parts, recipe, trial
from tritium.pipelines.bare import BareModel
from tritium.pipelines.captures import Captures
from tritium.pipelines.installed import Installed
from tritium.pipelines.plan import Choice, Plan, choice_of
from tritium.pipelines.progress import Progress
from tritium.pipelines.warm_up import warm_up
from tritium.report import Component, Report, Violation, text

# Here and not in the first call: a service imports before it loads its model, while nobody waits for a picture.
compat.import_compiler()


def optimize(
    pipe: Any,
    plan: Plan | str | Path | None = None,
    *,
    artifacts: str | Path | None = None,
    accept_differences: bool = False,
) -> Handle:
    """Make a live diffusers pipeline, or a bare denoiser or decoder, fast.

    Args:
        pipe: A stock `DiffusionPipeline`, on its device and in its dtype; or an `nn.Module` for a loop of your own, which is
            changed in place and has one part called `model`.
        plan: What to do; without one, the defaults. A path is a recipe that `tritium tune` has written.
        artifacts: A file that `Handle.save` has written: what is in it is not compiled again. One that does not fit is
            refused with a warning, and the pipeline compiles as usual.
        accept_differences: Use a recipe although it was measured on another machine, version or model.

    Compilation happens in the first call. Used as a context manager, the handle removes itself at the end.
    """
    source = _source_of(pipe, "optimize")
    if isinstance(plan, (str, Path)):
        plan = recipe.load(Path(plan)).plan_for(source, accept_differences=accept_differences)
    elif accept_differences:
        raise ConfigError("accept_differences concerns recipes, and no recipe was given")
    plan = plan if plan is not None else Plan()
    if not isinstance(plan, Plan):
        raise ConfigError(f"optimize takes a Plan or the path of a recipe, got {type(plan).__name__}")
    if isinstance(source, BareModel) and plan.shapes is not None:
        raise ConfigError(
            "Plan.shapes promises the sizes of images, and a bare model is called with tensors; leave it out"
        )
    return Handle(source, plan, artifacts)


class Handle:
    """What `optimize` put on a pipeline: `remove()` takes it off, `report` says what it did, `summary()` prints how long
    each part takes.
    """

    def __init__(self, pipe: Any, plan: Plan, compiled_before: str | Path | None = None) -> None:
        # A bare model stands in a pipeline of its own, which users do not see.
        self._source = pipe
        self.plan = plan
        found = parts.find(pipe, plan)
        shared = _shared(pipe, plan, found)
        chosen = {part.name: _chosen(part, plan, shared.get(part.name)) for part in found}
        # A plan's own word counts; measuring is for the rest.
        to_measure = {
            part.name
            for part in found
            if plan.measure and plan.choice(part.name) is None and part.targets and part.name not in shared
        }
        compiled = [part for part in found if part.name in to_measure or chosen[part.name].how != "eager"]
        for part in found:
            parts.check_choice(part, chosen[part.name])
        for part in compiled:
            if part.name not in shared or shared[part.name].choice == claims.PASSIVE:
                hooks.check(part)
        self.artifacts = _load(compiled_before, pipe)
        classes = {type(part.entry if part.whole else target.module) for part in compiled for target in part.targets}
        self.progress = Progress(len(classes), shown=plan.progress)
        self._installed: list[Installed] = []
        for part in found:
            installed = shared.get(part.name) or Installed(part, chosen[part.name], plan, self.progress)
            self._installed.append(installed)
            if part.name not in shared:
                installed.why = "" if plan.choice(part.name) is not None else part.left
                if part.name in to_measure:
                    installed.entry.before_first = self._decision(installed)
                installed.install()
            installed.claim(self, part, chosen[part.name])
        self._active = True

    @property
    def pipe(self) -> Any:
        """The pipeline or the model that was given to `optimize`."""
        return _given(self._source)

    @classmethod
    def of(cls, pipe: Any) -> Handle | None:
        """Return the handle that is on a pipeline, or None."""
        source = _source_of(pipe, "Handle.of")
        components = [value for value in source.components.values() if isinstance(value, nn.Module)]
        found = (Installed.on(module) for component in components for module in component.modules())
        handles = (handle for installed in found if installed is not None for handle in installed.claims.handles)
        return next((handle for handle in handles if handle.pipe is pipe), None)

    def _decision(self, installed: Installed) -> Any:
        def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.progress.tell(f"{installed.part.name}: measuring the ways it can run")
            trial.decide(installed, [(args, kwargs)])
            self.progress.tell(f"{installed.part.name}: {installed.choice} ({installed.why})")

        return decide

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Give the pipeline back as it was. Removing twice does nothing."""
        if not self._active:
            return
        self._active = False
        # Recordings of parts that another pipeline uses stay.
        Captures(
            lambda: self._report_of([one for one in self._installed if one.claims.handles == [self]]).records
        ).clear()
        for installed in self._installed:
            installed.release(self)

    def warmup(self, **call: Any) -> dict[str, float]:
        """Compile and capture every bucket of `Plan(shapes=...)`; returns the seconds each took.

        Afterwards no call inside compiles, and one outside follows `on_violation`. Arguments go to every call of the
        pipeline: give those that your own calls have and that change what is computed, such as `negative_prompt`. Warm up
        in the mode in which you call: under `torch.inference_mode()` if you call it there.
        """
        if self.plan.shapes is None:
            raise PipelineError("there is nothing to warm up: say what will be asked for with Plan(shapes=Shapes(...))")
        if not self._active:
            raise PipelineError("this handle is removed")
        return warm_up(self.pipe, self.plan.shapes, self._installed, self.progress, call)

    @property
    def captures(self) -> Captures:
        """The recordings of all parts; `handle.captures.clear()` gives their memory back."""
        return Captures(lambda: self.report.records)

    @property
    def violations(self) -> list[Violation]:
        """Calls outside of `Plan(shapes=...)`, and what was done with them."""
        return [
            Violation(installed.part.name, new.what, done, times, new.suggestion)
            for installed in self._installed
            if installed.contract is not None
            for (new, done), times in installed.contract.violations.items()
        ]

    @property
    def active(self) -> bool:
        return self._active

    @property
    def choices(self) -> dict[str, Choice]:
        """What runs each part now."""
        return {installed.part.name: installed.choice for installed in self._installed}

    def use(self, choices: Mapping[str, Choice | str]) -> None:
        """Switch parts to other ways of running; compiled code is kept for switching back."""
        if not self._active:
            raise PipelineError("this handle is removed; call tritium.optimize on the pipeline again")
        if not isinstance(choices, Mapping):
            raise ConfigError(f"use takes a mapping from a part's name to a Choice, got {choices!r}")
        checked = [(self.part(name), choice_of(name, choice)) for name, choice in choices.items()]
        for installed, choice in checked:
            parts.check_choice(installed.part, choice)
            reason = installed.refusal(installed.part, choice, self.plan, self)
            if reason is not None:
                raise PipelineError(reason)
        for installed, choice in checked:
            installed.switch(self, choice)

    def part(self, name: str) -> Installed:
        """One part, to switch it: `handle.part("vae.decode").use(Choice(how="eager"))`."""
        if not isinstance(name, str):
            raise PipelineError(f"a part is named by a string, got {name!r}")
        found = {installed.part.name: installed for installed in self._installed}
        if name not in found:
            raise PipelineError(f"this pipeline has no part {name!r}; {nearest(name, found)}")
        return found[name]

    @property
    def report(self) -> Report:
        """What was done to all components, declined, and why; `tritium.explain(handle, call=...)` also measures kernels."""
        return self._report_of(self._installed)

    def _report_of(self, installed: list[Installed]) -> Report:
        try:
            return explain(_Parts([one.part.entry for one in installed], self.components, self.violations))
        except ReportError:
            # Nothing was compiled yet, or by Tritium.
            return Report([], components=self.components, violations=self.violations)

    @property
    def entries(self) -> list[nn.Module]:
        """The modules through which each part is called."""
        return [installed.part.entry for installed in self._installed]

    @property
    def components(self) -> list[Component]:
        """Time, share and what was done, by part."""
        rows = [(installed, installed.entry.times.milliseconds()) for installed in self._installed]
        total = sum(ms * installed.entry.times.calls for installed, ms in rows if ms is not None)
        return [
            Component(
                name=installed.part.name,
                milliseconds=ms,
                calls=installed.entry.times.calls,
                share=ms * installed.entry.times.calls / total if ms is not None and total else None,
                first_call_seconds=sum(installed.entry.times.compiling),
                what=account.of(installed, self._source, self),
            )
            for installed, ms in rows
        ]

    def __str__(self) -> str:
        return text.components(Report([], components=self.components))

    def summary(self) -> None:
        """Print, by part: the time of a call, its share, and what was done."""
        sys.stdout.write(f"{self}\n")

    def save(self, path: str | Path) -> compiled_files.ArtifactSummary:
        """Keep what was compiled as one file, for `optimize(..., artifacts=path)` in another process."""
        return compiled_files.save(Path(path), recipe.fingerprint_of(self._source))


def _source_of(pipe: Any, asked: str) -> Any:
    """A pipeline as it is, and a bare model in a pipeline of its own."""
    if isinstance(pipe, nn.Module):
        return BareModel(pipe)
    if not isinstance(getattr(pipe, "components", None), Mapping):
        raise PipelineError(f"{asked} takes a DiffusionPipeline or an nn.Module, got {type(pipe).__name__}")
    return pipe


def _given(source: Any) -> Any:
    return source.module if isinstance(source, BareModel) else source


@dataclass(frozen=True)
class _Parts:
    """Some parts of a handle, to explain."""

    entries: list[nn.Module]
    components: list[Component]
    violations: list[Violation]


def _chosen(part: parts.Part, plan: Plan, shared: Installed | None) -> Choice:
    """The plan's choice; where it has none, that of a pipeline that shares the part, or the default."""
    theirs = shared.claims.active() if shared is not None else None
    return plan.choice(part.name) or theirs or part.default


def _shared(pipe: Any, plan: Plan, found: list[parts.Part]) -> dict[str, Installed]:
    """The parts that other pipelines have claimed; a `PipelineError` where their choices exclude each other."""
    shared = {part.name: installed for part in found if (installed := Installed.on(part.entry)) is not None}
    if any(handle.pipe is _given(pipe) for installed in shared.values() for handle in installed.claims.handles):
        raise PipelineError(
            "this pipeline is optimized already; call remove() on its handle (tritium.Handle.of(pipe)) before "
            "optimizing it again"
        )
    for part in found:
        if part.name in shared:
            reason = shared[part.name].refusal(part, _chosen(part, plan, shared[part.name]), plan)
            if reason is not None:
                raise PipelineError(reason)
    return shared


def _load(path: str | Path | None, pipe: Any) -> compiled_files.ArtifactSummary | None:
    """Load artifacts, or warn why they are of no use: the pipeline then compiles as usual."""
    if path is None:
        return None
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"artifacts takes the path of a file, got {path!r}")
    try:
        # Reading them imports half of torch's compiler.
        with collector.paused():
            return compiled_files.load(Path(path), recipe.fingerprint_of(pipe))
    except ArtifactError as error:
        warnings.warn(f"tritium: {error}; compiling as usual", RuntimeWarning, stacklevel=4)
        return None
