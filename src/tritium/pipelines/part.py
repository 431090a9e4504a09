"""One part of a pipeline: switch it between eager, torch.compile and Tritium with techniques, and restore it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from tritium import compat
from tritium.collector import collector_paused
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import PipelineError
from tritium.passes import Pass
from tritium.pipelines import hooks
from tritium.pipelines.applied import Settings, Stack, View, resolve, variants
from tritium.pipelines.arguments import AnySize, with_even_strides
from tritium.pipelines.call import Call, Function, Times, chain
from tritium.pipelines.claims import PASSIVE, Claims
from tritium.pipelines.contract import Contract, Gate
from tritium.pipelines.own_code import call_with_own_code
from tritium.pipelines.parts import KEPT, PartSpec
from tritium.pipelines.plan import Plan
from tritium.pipelines.progress import Progress
from tritium.pipelines.whole import Whole
from tritium.techniques import Note, catalog
from tritium.techniques.choice import Choice
from tritium.techniques.technique import Around


class _Apart(Backend):
    """A backend unequal to one of the same configuration: Dynamo then keeps their compiled code apart."""

    def __init__(self, config: CompilationConfig, passes: Sequence[Pass], apart: Hashable) -> None:
        self._apart = apart
        super().__init__(config, passes=passes)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._apart)


@dataclass(frozen=True)
class _InductorApart:
    """Plain Inductor, unequal to itself for other values."""

    apart: Hashable

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        return compat.inductor.compile_fx(gm, example_inputs)


class Part:
    """A part of one pipeline, or of several that share it."""

    def __init__(self, spec: PartSpec, choice: Choice, plan: Plan, progress: Progress) -> None:
        self.choice = choice
        # The only modules that are compiled, or None for all.
        self.among: Container[nn.Module] | None = None
        # The reason for this choice, and the milliseconds of each way of running that was measured.
        self.why = ""
        self.measured: dict[str, float] = {}
        # Called once with the arguments of the next call, before it runs.
        self.before_first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        # The captures that the last sleep freed.
        self.captured_again = 0
        # The mesh of ranks, if it was chosen by its cost.
        self.mesh: Any = None
        self.claims = Claims()
        self.call = Call(spec.module, self)
        self.times = Times()
        self._times_of: dict[Choice, Times] = {}
        self._techniques = Stack(self)
        # How the part is compiled now, with all techniques.
        self._settings = Settings("eager", plan.config)
        self._missing: list[str] = []
        # The values of the slots before, and those that this class put there, by module.
        self._before: dict[nn.Module, Any] = {}
        self._placed: dict[nn.Module, Any] = {}
        # The settings for which the slots of blocks are filled now.
        self._placed_for: Settings | None = None
        self._removed = False
        self._configure(spec, plan, progress)

    def _configure(self, spec: PartSpec, plan: Plan, progress: Progress) -> None:
        """Set how the part is compiled from now on."""
        self.spec, self.plan, self._progress = spec, plan, progress
        for module in (spec.module, *(block.module for block in spec.blocks)):
            if compat.modules.COMPILED_CALL in module.__dict__ and module not in self._placed:
                self._before.setdefault(module, module.__dict__[compat.modules.COMPILED_CALL])
        # Compile promised shapes one by one: code for a single size is the fastest for it.
        self._dynamic = False if plan.dynamic is None and plan.shapes is not None else plan.dynamic
        self.contract = None
        if plan.shapes is not None:
            self.contract = Contract(spec.name, spec.module, plan.shapes.on_violation, len(plan.shapes.buckets))
        self._wholes: dict[Settings, Whole] = {}
        self._calls: dict[tuple[Settings, nn.Module], Function] = {}
        self._any_size: list[AnySize] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def module(self) -> nn.Module:
        """Return the module whose calls are the calls of the part."""
        return self.spec.module

    @property
    def component(self) -> nn.Module:
        """Return the pipeline's component that contains the module."""
        return self.spec.component or self.spec.module

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """Return the modules with compiled calls of their own."""
        return tuple(block.module for block in self.spec.blocks)

    @property
    def components(self) -> tuple[nn.Module, ...]:
        """Return the modules of the pipelines that run the part."""
        pipes = [handle.pipe for handle in self.claims.handles]
        found = [
            value for pipe in pipes for value in ([pipe] if isinstance(pipe, nn.Module) else pipe.components.values())
        ]
        return tuple(value for value in found if isinstance(value, nn.Module))

    @property
    def schedulers(self) -> tuple[Any, ...]:
        schedulers = (handle.scheduler for handle in self.claims.handles)
        return tuple(scheduler for scheduler in schedulers if scheduler is not None)

    @classmethod
    def on(cls, module: nn.Module) -> Part | None:
        """Return the part that a live handle runs with this module, or None."""
        call = compat.modules.compiled_call(module)
        if not isinstance(call, Call):
            return None
        part: Part = call.part
        if not part.claims.handles:
            # The handles were dropped together with their pipelines.
            part.remove()
            return None
        return part

    # --- claims of several pipelines ---

    def fits(self, spec: PartSpec, plan: Plan) -> bool:
        """Return True if a plan compiles the part in the same way as the current plan."""
        names = ("config", "dynamic", "shapes", "check_memory")
        alike = all(getattr(self.plan, name) == getattr(plan, name) for name in names)
        blocks = [block.module for block in spec.blocks] == [block.module for block in self.spec.blocks]
        return alike and blocks and self.plan.inherited() == plan.inherited()

    def refusal(self, spec: PartSpec, choice: Choice, plan: Plan, handle: Any = None) -> str | None:
        """Return why another handle's claim rules out a choice, or None."""
        theirs = self.claims.active(but=handle)
        if theirs is None or choice == PASSIVE or (choice == theirs and self.fits(spec, plan)):
            return None
        other = type(next(one.pipe for one in self.claims.handles if one is not handle)).__name__
        return (
            f"{spec.name} is shared with another pipeline ({other}) that is optimized already and runs it with {theirs}: "
            f"give both the same Plan, leave it alone here with Plan(components={{{spec.name!r}: 'eager'}}), or call "
            "remove() on that one's handle first"
        )

    def claim(self, handle: Any, spec: PartSpec, choice: Choice) -> None:
        """Add a handle's claim, and run the part with its choice; call only if `refusal` returned None."""
        theirs = self.claims.active(but=handle)
        self.claims.add(handle, choice, strongly=spec.name in KEPT)
        is_in_use = self._placed_for is not None
        if theirs is not None or (is_in_use and choice == PASSIVE and self.choice == PASSIVE):
            return
        if not self.fits(spec, handle.plan):
            self.use(PASSIVE)
            self._configure(spec, handle.plan, handle.progress)
        self.use(choice)

    def release(self, handle: Any) -> None:
        """Drop a handle's claim; restore the part if it was the last one."""
        self.claims.drop(handle)
        if not self.claims.handles:
            self.remove()
        elif self.claims.active() is None:
            self.use(PASSIVE)

    def switch(self, handle: Any, choice: Choice) -> None:
        """Change a handle's choice; if another handle runs the part, its choice stays in effect."""
        self._refuse_removed()
        self.claim(handle, self.spec, choice)
        if self.claims.active() is None:
            self.use(PASSIVE)

    # --- ways of running ---

    def check(self, choice: Choice, plan: Plan, handle: Any = None) -> tuple[dict[str, Any], list[str]]:
        """Return the techniques of the part under a choice, and notes on missing ones; change nothing.

        Raises a `PipelineError` if the part cannot run with the choice. `handle` is about to claim the part.
        """
        if choice.how != "eager" and not self.spec.blocks:
            name = self.name.partition(".")[0]
            raise PipelineError(
                f"{self.name} cannot be compiled: its repeated blocks cannot be found; name their classes with "
                f"Plan(blocks={{{name!r}: ('Block',)}}), or leave it alone with Plan(components={{{self.name!r}: 'eager'}})"
            )
        return resolve(View(self, Settings(choice.how, plan.config), joining=handle), choice, plan)

    def use(self, choice: Choice, among: Container[nn.Module] | None = None) -> None:
        """Switch to another way of running; keep earlier compiled code for the next switch.

        With `among`, compile only the blocks among those modules.
        """
        self._refuse_removed()
        configs, missing = self.check(choice, self.plan)
        if choice.how != "eager" and (self._before or compat.modules.is_wrapped(self.module)):
            # The part was eager until now and may have been compiled by other code.
            hooks.check(self.spec)
        self._techniques.switch(Settings(choice.how, self.plan.config), configs)
        self.choice, self.among, self._missing = choice, among, missing
        self.times = self._times_of.setdefault(choice, Times())
        self._settings = self._techniques.settings
        self._place(self._settings, among)
        self._set_call(among)
        self._put(self.module, self.call)

    def variants(self) -> list[Choice]:
        """Return the choices that techniques propose to try."""
        return variants(View(self, Settings("tritium", self.plan.config)), self.plan)

    def lossy_variants(self) -> list[Choice]:
        """Return the choices that techniques propose where losses are allowed."""
        config = self.plan.config.with_(fidelity="fast")
        return [choice for choice in variants(View(self, Settings("tritium", config)), self.plan) if choice.is_lossy]

    @property
    def insisted(self) -> list[str]:
        """Return the lossy techniques that the plan names for the part, and that it can have."""
        configs, _ = self.check(Choice(), self.plan)
        return [name for name in configs if self.plan.names(name) and catalog()[name].is_lossy]

    def configs(self, choice: Choice | None = None) -> dict[str, Any]:
        """Return the techniques of the part under a choice, by name; by default under the current one."""
        return self.check(self.choice if choice is None else choice, self.plan)[0]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the part without counting it."""
        return self.call.uncounted(*args, **kwargs)

    def remove(self) -> None:
        self._removed = True
        for block in self.spec.blocks:
            self._put_back(block.module)
        self._put_back(self.module)
        self._techniques.clear()

    def pause(self, reason: str) -> None:
        """Let every call raise, until `resume`."""

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise PipelineError(reason)

        self.call.traced = self.call.uncounted = self.call.counted = refuse

    def resume(self) -> None:
        self._set_call(self.among)

    @contextmanager
    def using(self, choice: Choice, among: Container[nn.Module] | None = None) -> Iterator[None]:
        before = self.choice
        self.use(choice, among)
        try:
            yield
        finally:
            self.use(before)

    def _refuse_removed(self) -> None:
        if self._removed:
            raise PipelineError(
                f"{self.name} cannot be switched: its handle is removed; call tritium.optimize on the pipeline again"
            )

    # --- what happens around a call ---

    def _set_call(self, among: Container[nn.Module] | None) -> None:
        """Put together the call of the part: the functions around it, outermost first, and its program."""
        settings, outside, inside = self._settings, self._techniques.outside, self._techniques.inside
        around: list[Around] = [self._reported]
        # A budget makes room for a decode, or refuses it itself.
        if self.spec.guard is not None and self.plan.check_memory and self.state_of("memory") is None:
            around.insert(0, self._checked)
        if self.choice.how != "eager":
            around.insert(0, self._compiling)
            if self.contract is not None:
                around.append(self.contract.around)
        program = self.program(settings, among)
        self.call.uncounted = chain([*around, *inside], program)
        self.call.counted = chain([*outside, self._first, self.times.around], self.call.uncounted)
        # In a larger graph that the caller compiles, Dynamo inlines what it can.
        is_whole = self._is_whole(settings, among)
        self.call.traced = chain([*outside, *inside], self.call.plain if is_whole else self._inner(settings, among))

    def _first(self, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.before_first is not None:
            decide, self.before_first = self.before_first, None
            decide(args, kwargs)
            # The decision may have changed what runs.
            return self.times.around(self.call.uncounted, args, kwargs)
        return call(*args, **kwargs)

    def _compiling(self, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The first call after a switch compiles.
        if self.times.calls > 1:
            return call(*args, **kwargs)
        with collector_paused():
            return call(*args, **kwargs)

    def _checked(self, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.spec.guard is not None
        self.spec.guard.check(args, kwargs)
        return call(*args, **kwargs)

    def _reported(self, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._progress.during(self.name):
            return call(*args, **kwargs)

    # --- compiled programs ---

    def program(self, settings: Settings, among: Container[nn.Module] | None = None) -> Function:
        """Return a function that runs the part as compiled with these settings."""
        inner = self._inner(settings, among)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._placed_for is not settings:
                # Another program of this part ran in between.
                self._place(settings, among)
            return inner(*args, **kwargs)

        return run

    def _is_whole(self, settings: Settings, among: Container[nn.Module] | None) -> bool:
        return self.spec.whole and settings.how == "tritium" and among is None and not settings.around_blocks

    def _inner(self, settings: Settings, among: Container[nn.Module] | None) -> Function:
        """Return the call of the part's module around its blocks."""
        if self._is_whole(settings, among):
            return self._whole(settings)
        compiles = settings.how != "eager" and (among is None or self.module in among)
        if compiles and any(block.module is self.module for block in self.spec.blocks):
            return self._compiled_call(settings, self.module)
        return self.call.plain

    def _whole(self, settings: Settings) -> Whole:
        if settings not in self._wholes:

            def compile_for(hooks: Hashable) -> Function:
                config = settings.config.with_(reuse_blocks=True)
                apart = settings.apart if hooks is None else (*settings.apart, hooks)
                return self._compiled(self.module, replace(settings, config=config, apart=apart), fullgraph=True)

            self._wholes[settings] = Whole(self.module, compile_for, lambda: self._by_blocks(settings))
        return self._wholes[settings]

    @contextmanager
    def _by_blocks(self, settings: Settings) -> Iterator[Function]:
        """Compile the blocks one by one from now on; go back to the whole if the call inside raises."""
        self._place_blocks(settings, None)
        compiles = any(block.module is self.module for block in self.spec.blocks)
        try:
            yield self._compiled_call(settings, self.module) if compiles else self.call.plain
        except BaseException:
            self._place(settings, None)
            raise

    def _place(self, settings: Settings, among: Container[nn.Module] | None) -> None:
        """Fill the slots of the blocks for these settings, or empty them if the part is one program."""
        self._placed_for = settings
        as_one = self._is_whole(settings, among) and self._whole(settings).refused is None
        self._place_blocks(settings, () if as_one else among)

    def _place_blocks(self, settings: Settings, among: Container[nn.Module] | None) -> None:
        for block in self.spec.blocks:
            if block.module is self.module:
                continue
            is_eager = settings.how == "eager" or (among is not None and block.module not in among)
            around = [found for choose in settings.around_blocks if (found := choose(block.module)) is not None]
            if is_eager and not around:
                self._put_back(block.module)
            else:
                # The call of the block that this one replaces, while the part is eager.
                eager = self._before.get(block.module) or compat.modules.eager_call(block.module)
                call = eager if is_eager else self._compiled_call(settings, block.module)
                self._put(block.module, chain(around, call))

    def _put(self, module: nn.Module, call: Function) -> None:
        if module not in self.replaced:
            # Write to `__dict__`: nn.Module.__setattr__ searches the parameters, and trials switch between timed calls.
            module.__dict__[compat.modules.COMPILED_CALL] = call
            self._placed[module] = call

    def _put_back(self, module: nn.Module) -> None:
        if module in self.replaced or module not in self._placed:
            return
        del self._placed[module]
        if module in self._before:
            module.__dict__[compat.modules.COMPILED_CALL] = self._before[module]
        else:
            module.__dict__.pop(compat.modules.COMPILED_CALL, None)

    @property
    def replaced(self) -> list[nn.Module]:
        """Return modules whose call was replaced after the installation, as by `module.compile()`; it stays."""
        slot = compat.modules.COMPILED_CALL
        return [module for module, call in self._placed.items() if module.__dict__.get(slot) is not call]

    def _compiled_call(self, settings: Settings, module: nn.Module) -> Function:
        key = (settings, module)
        if key not in self._calls:
            path = next(block.path for block in self.spec.blocks if block.module is module)
            passes = tuple(entry.within(path) for entry in settings.passes)
            self._calls[key] = self._compiled(module, replace(settings, passes=passes))
        return self._calls[key]

    def _compiled(self, module: nn.Module, settings: Settings, *, fullgraph: bool = False) -> Function:
        function = call_with_own_code(module) if module is self.module else compat.modules.eager_call(module)
        compiled: Function = torch.compile(
            function, backend=backend_of(settings), dynamic=self._dynamic, fullgraph=fullgraph
        )
        prepare = functools.partial(self._prepared, settings, module)
        # Without a contract there are no decisions to follow.
        return prepare(compiled) if self.contract is None else Gate(module, function, compiled, prepare)

    def _prepared(self, settings: Settings, module: nn.Module, compiled: Function) -> Function:
        """Wrap a compiled call so that calls of equal sizes look equal to Dynamo."""
        if module is self.module:
            compiled = functools.partial(compiled, module)
        if settings.how == "tritium":
            compiled = with_even_strides(compiled)
        if not self.spec.varying or self._dynamic is False:
            return compiled
        any_size = AnySize(module, compiled, self.spec.varying)
        self._any_size.append(any_size)
        return any_size

    # --- for the summary ---

    @property
    def calls_to_settle(self) -> int:
        """Return after how many calls of one shape later calls behave alike."""
        return self._techniques.calls_to_settle

    @property
    def refused(self) -> str | None:
        """Return why the part is compiled block by block and not as one program, or None."""
        whole = self._wholes.get(self._settings)
        return whole.refused if whole is not None else None

    @property
    def what(self) -> str:
        if self._is_whole(self._settings, self.among) and self.refused is None:
            return f"{type(self.module).__name__} as one program"
        return self.spec.what

    @property
    def notes(self) -> list[str]:
        """Return notes on the calls so far, for the summary."""
        slivers = sum(call.slivers for call in self._any_size)
        notes = [f"block by block: its forward is not one program ({self.refused})"] if self.refused else []
        again = self.captured_again
        notes += [f"was asleep: {again} captures had to be made again"] if again else []
        notes += [f"{slivers} calls of one row or column ran eagerly"] if slivers else []
        notes += self._missing
        return notes + ([self.spec.guard.unknown] if self.spec.guard is not None and self.spec.guard.unknown else [])

    def state_of(self, technique: str) -> Any:
        """Return the state of a technique that is applied to the part, or None."""
        return self._techniques.state_of(technique)

    @property
    def technique_notes(self) -> dict[str, Note]:
        return self._techniques.notes()


def backend_of(settings: Settings) -> Any:
    if settings.how == "inductor":
        return _InductorApart(settings.apart) if settings.apart else "inductor"
    if settings.apart:
        return _Apart(settings.config, settings.passes, settings.apart)
    return Backend(settings.config, passes=settings.passes)
