"""The main entry point: `handle = tritium.optimize(pipe)`.

Each part of the pipeline runs as set in the plan. The pipeline object is changed in place, and `handle.remove()`
restores it.
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

from tritium import compat, device
from tritium.artifacts import files as compiled_files
from tritium.artifacts import observations
from tritium.collector import collector_paused
from tritium.errors import ArtifactError, ConfigError, PipelineError, ReportError, nearest
from tritium.pipelines import account, calibration, claims, hooks, meshes, parts, placing, recipe, trial
from tritium.pipelines import sleep as sleeping
from tritium.pipelines.calibration import Calibration
from tritium.pipelines.captures import Captures
from tritium.pipelines.part import Part
from tritium.pipelines.parts import BareModel, PartSpec
from tritium.pipelines.plan import Plan, choice_of
from tritium.pipelines.progress import Progress
from tritium.pipelines.skipping import Skipping
from tritium.pipelines.together import Together
from tritium.pipelines.warm_up import warm_up
from tritium.report import Report, text
from tritium.report.explain import explain
from tritium.report.records import Component, Violation
from tritium.techniques.choice import Choice
from tritium.techniques.quantize.sensitivity import Sensitivity

# Import at startup and not in the first call, where a user waits for an image.
compat.inductor.import_compiler()


def optimize(
    pipe: Any,
    plan: Plan | str | Path | None = None,
    *,
    artifacts: str | Path | None = None,
    accept_differences: bool = False,
    scheduler: Any = None,
) -> Handle:
    """Accelerate a loaded diffusers pipeline, or a single denoiser or decoder; return a handle.

    Args:
        pipe: A stock `DiffusionPipeline`, on its device and in its dtype; or an `nn.Module` that you call directly. A
            module is changed in place and has one part called `model`.
        plan: The settings; defaults if omitted. A path is read as a recipe written by `tritium tune`,
            and "example" is the recipe that ships for `load_example()`.
        artifacts: A file written by `Handle.save`: the code in it is not compiled again. A file that does not fit is
            ignored with a warning, and the pipeline compiles as usual.
        accept_differences: Use a recipe even if it was measured on another machine, version or model.
        scheduler: The scheduler of a bare model's loop, for techniques that read it; a pipeline has its own.

    Compilation happens in the first call. As a context manager, the handle removes itself at the end.
    """
    source = _source_of(pipe, scheduler)
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
    """An optimized pipeline: `remove()` restores it; `report` and `summary()` show what was done to it."""

    def __init__(self, pipe: Any, plan: Plan, compiled_before: str | Path | None = None) -> None:
        # For a bare model, a `BareModel` that users do not see.
        self._source = pipe
        self.plan = plan
        self._parts: list[Part] = []
        self._together = Together(pipe, plan)
        try:
            with self._together.installing():
                self._install(pipe, plan, compiled_before)
        except BaseException:
            # A technique may raise while it is applied: leave the pipeline as it was.
            for part in self._parts:
                part.release(self)
            raise
        self._together.guard()
        self._active = True
        self._asleep: sleeping.Asleep | None = None

    def _install(self, pipe: Any, plan: Plan, compiled_before: str | Path | None) -> None:
        specs = parts.find(pipe, plan)
        shared = _shared(pipe, plan, specs)
        chosen = {spec.name: _chosen(spec, plan, shared.get(spec.name)) for spec in specs}
        # A choice in the plan takes precedence; only the other parts are measured.
        to_measure = {
            spec.name
            for spec in specs
            if plan.measure and plan.choice(spec.name) is None and spec.blocks and spec.name not in shared
        }
        compiled = [spec for spec in specs if spec.name in to_measure or chosen[spec.name].how != "eager"]
        classes = {type(spec.module if spec.whole else block.module) for spec in compiled for block in spec.blocks}
        self.progress = Progress(len(classes), shown=plan.progress)
        found = [shared.get(spec.name) or Part(spec, chosen[spec.name], plan, self.progress) for spec in specs]
        for part in found:
            part.check(chosen[part.name], plan, self)
        for spec in compiled:
            if spec.name not in shared or shared[spec.name].choice == claims.PASSIVE:
                hooks.check(spec)
        self.artifacts = _load(compiled_before, pipe)
        if _needs_workers(compiled, plan, self.artifacts):
            compat.inductor.start_workers()
        self._together.agree(found)
        self._parts = found
        for part, spec in zip(self._parts, specs, strict=True):
            if part.name not in shared:
                part.why = "" if plan.choice(part.name) is not None else spec.left
                if part.name in to_measure:
                    part.before_first = self._decision(part)
                part.before_first = meshes.decision(part, chosen[part.name], pipe, self) or part.before_first
            part.claim(self, spec, chosen[part.name])
        self._put_back = placing.place(pipe, self._parts)

    @property
    def pipe(self) -> Any:
        """Return the pipeline or model that was passed to `optimize`."""
        return _given(self._source)

    @property
    def scheduler(self) -> Any:
        """Return the scheduler of the pipeline, or the one given with a bare model; None if there is none."""
        return getattr(self._source, "scheduler", None)

    def _decision(self, part: Part) -> Any:
        def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.progress.tell(f"{part.name}: measuring the ways it can run")
            trial.decide(part, [(args, kwargs)])
            self.progress.tell(f"{part.name}: {part.choice} ({part.why})")

        return decide

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the pipeline. A second call does nothing."""
        if not self._active:
            return
        if self._asleep is not None:
            self.wake()
        self._active = False
        # Keep the captures of parts that another pipeline uses.
        own = [part for part in self._parts if part.claims.handles == [self]]
        Skipping(lambda: own).on()
        Captures(lambda: self._report_of(own).records).clear()
        for part in self._parts:
            part.release(self)
        self._put_back()
        self._together.release()

    def sleep(self) -> sleeping.Asleep:
        """Give the device memory of weights and captures back, until `wake`; return what was given back.

        The weights are kept on the host, bit for bit. Calls raise a `PipelineError`. Memory that PyTorch has cached is
        returned to the device as well.
        """
        self._refuse_removed()
        if self._asleep is None:
            self._asleep = sleeping.sleep(self._source, self._parts, self._captures_of)
            device.empty_cache()
        return self._asleep

    def _captures_of(self, part: Part) -> Captures:
        return Captures(lambda: self._report_of([part]).records)

    def wake(self) -> None:
        """Take the memory again after `sleep`. Compiled code is kept; captures are made again in the next calls."""
        self._refuse_removed()
        if self._asleep is not None:
            sleeping.wake(self._parts, self._asleep)
            self._asleep = None

    def warmup(self, pipe: Any = None, **call: Any) -> dict[str, float]:
        """Compile and capture every bucket of `Plan(shapes=...)`; return the seconds for each.

        Afterwards calls with these shapes do not compile, and other calls follow `on_violation`. Keyword arguments are
        passed to every call of the pipeline: pass those of your calls that change the computation, such as
        `negative_prompt`. Warm up in the mode of your calls, for example under `torch.inference_mode()`. `pipe` is another
        pipeline with the same components, such as one for inpainting, whose calls are to be promised too.
        """
        if self.plan.shapes is None:
            raise PipelineError("there is nothing to warm up: say what will be asked for with Plan(shapes=Shapes(...))")
        if not self._active:
            raise PipelineError("this handle is removed")
        return warm_up(self.pipe if pipe is None else pipe, self.plan.shapes, self._parts, self.progress, call)

    def sensitivity(self, prompts: Any, **call: Any) -> dict[str, Sensitivity]:
        """Measure the error of every quantized format at every linear of the denoisers; return it by part.

        The prompts run eagerly, and unquantized. Keyword arguments are passed to the pipeline's call. For a bare model
        give a list of the keyword arguments of its calls.
        """
        self._refuse_removed()
        # A skipped step has no inputs to measure.
        with self.skipping.paused():
            return calibration.sensitivity(self._parts, calibration.runner_of(self._source, prompts, call))

    def calibrate(self, prompts: Any, **call: Any) -> dict[str, Calibration]:
        """Choose what `quantize` leaves open, on images of these prompts, and use it; return what was measured by part.

        For quantize="auto" that is the fastest format within the budget, with the layers of large errors in a more
        accurate one; for rotate="auto" the layers whose int8 values are rotated; for scales="static" and "step" the scales
        of inputs. Use eight prompts or more. Both ways of running are timed: "auto" keeps the part unquantized if nothing
        saves 3 %, and a format that the plan names is kept, with a warning if it is slower. Pass
        `Plan(quantize=result["transformer"].config)` in another process.
        """
        self._refuse_removed()
        with self.skipping.paused():
            return calibration.calibrate(self, self._parts, calibration.runner_of(self._source, prompts, call))

    def _refuse_removed(self) -> None:
        if not self._active:
            raise PipelineError("this handle is removed; call tritium.optimize on the pipeline again")

    @property
    def parallel(self) -> meshes.Meshes:
        """Return how parts are split over ranks: the mesh, why, what its axes cost, and what every rank has whole."""
        return meshes.Meshes(self._parts, self._source)

    @property
    def skipping(self) -> Skipping:
        """Return what was skipped in the last image; `off()` and `on()` switch it."""
        return Skipping(lambda: self._parts)

    @property
    def captures(self) -> Captures:
        """Return the captures of all parts; `handle.captures.clear()` frees their memory."""
        return Captures(lambda: self.report.records)

    @property
    def violations(self) -> list[Violation]:
        """Return the calls outside of `Plan(shapes=...)`, and the reaction to each."""
        return [
            Violation(part.name, new.what, done, times, new.suggestion)
            for part in self._parts
            if part.contract is not None
            for (new, done), times in part.contract.violations.items()
        ]

    @property
    def active(self) -> bool:
        return self._active

    @property
    def choices(self) -> dict[str, Choice]:
        """Return the current choice for each part."""
        return {part.name: part.choice for part in self._parts}

    def use(self, choices: Mapping[str, Choice | str]) -> None:
        """Switch parts to other ways of running; compiled code is kept for switching back."""
        self._refuse_removed()
        if not isinstance(choices, Mapping):
            raise ConfigError(f"use takes a mapping from a part's name to a Choice, got {choices!r}")
        checked = [(self.part(name), choice_of(name, choice)) for name, choice in choices.items()]
        for part, choice in checked:
            part.check(choice, self.plan)
            reason = part.refusal(part.spec, choice, self.plan, self)
            if reason is not None:
                raise PipelineError(reason)
        for part, choice in checked:
            part.switch(self, choice)

    def part(self, name: str) -> Part:
        """Return one part by name, to switch it: `handle.part("vae.decode").use(Choice(how="eager"))`."""
        if not isinstance(name, str):
            raise PipelineError(f"a part is named by a string, got {name!r}")
        named = {part.name: part for part in self._parts}
        if name not in named:
            raise PipelineError(f"this pipeline has no part {name!r}; {nearest(name, named)}")
        return named[name]

    @property
    def report(self) -> Report:
        """Return what was done to all components, what was declined, and why.

        `tritium.explain(handle, call=...)` also measures kernels.
        """
        return self._report_of(self._parts)

    def _report_of(self, parts: list[Part]) -> Report:
        try:
            return explain(_Parts([part.module for part in parts], self.components, self.violations))
        except ReportError:
            # Nothing was compiled yet, or not with Tritium.
            return Report([], components=self.components, violations=self.violations)

    @property
    def entries(self) -> list[nn.Module]:
        """Return the module of each part."""
        return [part.module for part in self._parts]

    @property
    def components(self) -> list[Component]:
        """Return time, share and a description, by part."""
        rows = [(part, part.times.milliseconds()) for part in self._parts]
        total = sum(ms * part.times.calls for part, ms in rows if ms is not None)
        return [
            Component(
                name=part.name,
                milliseconds=ms,
                calls=part.times.calls,
                share=ms * part.times.calls / total if ms is not None and total else None,
                first_call_seconds=sum(part.times.compiling),
                what=account.of(part, self._source, self),
                techniques={name: dict(note.data) for name, note in part.technique_notes.items()},
            )
            for part, ms in rows
        ]

    def __str__(self) -> str:
        return text.components(Report([], components=self.components))

    def summary(self) -> None:
        """Print the time of a call, its share, and a description for each part."""
        sys.stdout.write(f"{self}\n")

    def save(self, path: str | Path) -> compiled_files.ArtifactSummary:
        """Write the compiled code to one file, for `optimize(..., artifacts=path)` in another process."""
        return compiled_files.save(Path(path), recipe.fingerprint_of(self._source))


def _source_of(pipe: Any, scheduler: Any) -> Any:
    """Return a pipeline unchanged, or a bare model wrapped as a pipeline."""
    if isinstance(pipe, nn.Module):
        return BareModel(pipe, scheduler)
    if not isinstance(getattr(pipe, "components", None), Mapping):
        raise PipelineError(f"optimize takes a DiffusionPipeline or an nn.Module, got {type(pipe).__name__}")
    if scheduler is not None:
        raise ConfigError("scheduler goes with a bare model; this pipeline has its own")
    return pipe


def _given(source: Any) -> Any:
    return source.module if isinstance(source, BareModel) else source


@dataclass(frozen=True)
class _Parts:
    """Parts of a handle, for `explain`."""

    entries: list[nn.Module]
    components: list[Component]
    violations: list[Violation]


def _chosen(spec: PartSpec, plan: Plan, shared: Part | None) -> Choice:
    """Return the plan's choice, else that of a pipeline that shares the part, else the default."""
    theirs = shared.claims.active() if shared is not None else None
    return plan.choice(spec.name) or theirs or spec.default


def _shared(pipe: Any, plan: Plan, specs: list[PartSpec]) -> dict[str, Part]:
    """Return the parts that other pipelines have claimed; raise a `PipelineError` if choices conflict."""
    shared = {spec.name: part for spec in specs if (part := Part.on(spec.module)) is not None}
    if any(handle.pipe is _given(pipe) for part in shared.values() for handle in part.claims.handles):
        raise PipelineError(
            "this pipeline is optimized already; call remove() on its handle before optimizing it again"
        )
    for spec in specs:
        if spec.name in shared:
            reason = shared[spec.name].refusal(spec, _chosen(spec, plan, shared[spec.name]), plan)
            if reason is not None:
                raise PipelineError(reason)
    return shared


def _needs_workers(compiled: list[PartSpec], plan: Plan, loaded: compiled_files.ArtifactSummary | None) -> bool:
    """Return True if the first call probably compiles GPU kernels; otherwise the first kernel starts the workers."""
    found = loaded is not None or observations.has_compiled()
    on_gpu = any(value.is_cuda for spec in compiled for value in spec.module.parameters())
    return not found and plan.config.engine == "inductor" and on_gpu


def _load(path: str | Path | None, pipe: Any) -> compiled_files.ArtifactSummary | None:
    """Load artifacts, or warn why they cannot be used; the pipeline then compiles as usual."""
    if path is None:
        return None
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"artifacts takes the path of a file, got {path!r}")
    try:
        # Loading artifacts imports half of torch's compiler.
        with collector_paused():
            return compiled_files.load(Path(path), recipe.fingerprint_of(pipe))
    except ArtifactError as error:
        warnings.warn(f"tritium: {error}; compiling as usual", RuntimeWarning, stacklevel=4)
        return None
