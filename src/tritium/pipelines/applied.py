"""The techniques that are applied to a part, and what they change about its calls and its compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from tritium.config import CompilationConfig
from tritium.errors import ConfigError, PipelineError
from tritium.passes import Pass
from tritium.pipelines.plan import Plan
from tritium.techniques import Note, Technique, catalog
from tritium.techniques.choice import Choice, How, Off, name_of
from tritium.techniques.technique import Around

if TYPE_CHECKING:
    from tritium.pipelines.part import Part


@dataclass(frozen=True)
class Settings:
    """How the calls of a part are compiled: equal settings share code."""

    how: How
    config: CompilationConfig
    passes: tuple[Pass, ...] = ()
    # What else keeps compiled code apart.
    apart: tuple[Hashable, ...] = ()
    # Each returns the function around the calls of a block, or None.
    around_blocks: tuple[Callable[[nn.Module], Around | None], ...] = ()


@dataclass
class View:
    """A part as one of its techniques sees it; implements `techniques.Part`."""

    owner: Part
    settings: Settings
    inside: list[Around] = field(default_factory=list)
    outside: list[Around] = field(default_factory=list)
    is_applying: bool = False
    # A handle that is about to claim the part.
    joining: Any = None

    @property
    def name(self) -> str:
        return self.owner.name

    @property
    def module(self) -> nn.Module:
        return self.owner.module

    @property
    def component(self) -> nn.Module:
        return self.owner.component

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return self.owner.blocks

    @property
    def components(self) -> tuple[nn.Module, ...]:
        return self.owner.components

    @property
    def how(self) -> str:
        return self.settings.how

    @property
    def config(self) -> CompilationConfig:
        return self.settings.config

    @property
    def schedulers(self) -> tuple[Any, ...]:
        joining = getattr(self.joining, "scheduler", None)
        return self.owner.schedulers or (() if joining is None else (joining,))

    def around(self, function: Around, *, outside: bool = False) -> None:
        self._check_applying("around")
        (self.outside if outside else self.inside).append(function)

    def compile_with(self, *, passes: Iterable[Pass] = (), apart: Hashable = None, **settings: Any) -> None:
        self._check_applying("compile_with")
        self.settings = self._with(passes, apart, settings)

    def compiled(self, *, passes: Iterable[Pass] = (), apart: Hashable = None, **settings: Any) -> Callable[..., Any]:
        return self.owner.program(self._with(passes, apart, settings))

    def _with(self, passes: Iterable[Pass], apart: Hashable, settings: dict[str, Any]) -> Settings:
        passes = tuple(passes)
        if self.how != "tritium" and (passes or settings):
            raise PipelineError(f"{self.name} runs with {self.how!r}, which takes no passes and no settings of Tritium")
        return dataclasses.replace(
            self.settings,
            config=self.settings.config.with_(**settings),
            passes=(*self.settings.passes, *passes),
            apart=self.settings.apart if apart is None else (*self.settings.apart, apart),
        )

    def around_blocks(self, choose: Callable[[nn.Module], Around | None]) -> None:
        self._check_applying("around_blocks")
        around = (*self.settings.around_blocks, choose)
        self.settings = dataclasses.replace(self.settings, around_blocks=around)

    def _check_applying(self, method: str) -> None:
        if not self.is_applying:
            raise PipelineError(f"a technique may call {method} while it is applied to {self.name}, not later")


@dataclass
class _Applied:
    technique: Technique[Any, Any]
    config: Any
    view: View
    state: Any = None


class Stack:
    """The techniques of one part, in the order in which they were applied."""

    def __init__(self, owner: Part) -> None:
        self._owner = owner
        self._base: Settings | None = None
        self._applied: list[_Applied] = []

    def switch(self, base: Settings, configs: Mapping[str, Any]) -> None:
        """Remove techniques and apply others, so that these configs are in effect; leave all as it was if one raises."""
        base_before, before = self._base, {entry.technique.name: entry.config for entry in self._applied}
        try:
            self._switch(base, configs)
        except BaseException:
            self.clear()
            if base_before is not None:
                self._switch(base_before, before)
            raise

    def _switch(self, base: Settings, configs: Mapping[str, Any]) -> None:
        # A technique that stays keeps what it prepared, as long as those before it stay too.
        wanted = list(configs.items())
        kept = 0
        if base == self._base:
            for entry, pair in zip(self._applied, wanted, strict=False):
                if (entry.technique.name, entry.config) != pair:
                    break
                kept += 1
        self._remove(kept)
        self._base = base
        for name, config in wanted[kept:]:
            technique = catalog()[name]
            view = View(self._owner, self.settings, is_applying=True)
            entry = _Applied(technique, config, view)
            entry.state = technique.apply(view, config)
            view.is_applying = False
            self._applied.append(entry)

    def clear(self) -> None:
        self._remove(0)
        self._base = None

    def _remove(self, kept: int) -> None:
        while len(self._applied) > kept:
            entry = self._applied.pop()
            entry.technique.remove(entry.view, entry.state)

    @property
    def settings(self) -> Settings:
        """Return how the part is compiled with all techniques."""
        assert self._base is not None
        return self._applied[-1].view.settings if self._applied else self._base

    @property
    def inside(self) -> list[Around]:
        return [function for entry in self._applied for function in entry.view.inside]

    @property
    def outside(self) -> list[Around]:
        return [function for entry in self._applied for function in entry.view.outside]

    @property
    def calls_to_settle(self) -> int:
        """Return after how many calls of one shape later calls behave alike."""
        return max((entry.technique.settles_after(entry.view, entry.config) for entry in self._applied), default=1)

    def state_of(self, technique: str) -> Any:
        return next((entry.state for entry in self._applied if entry.technique.name == technique), None)

    def notes(self) -> dict[str, Note]:
        """Return the note of each technique that has one, by its name."""
        notes = {e.technique.name: e.technique.report(e.view, e.config, e.state) for e in self._applied}
        return {name: note for name, note in notes.items() if note is not None}


def resolve(view: View, choice: Choice, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return the techniques of a part under a choice and a plan, and why it goes without others that the plan names.

    Raises a `PipelineError` if the choice itself names a technique that the part cannot have, or a required one conflicts.
    """
    own, inherited = choice.configs(), plan.inherited()
    left_out = {name_of("Choice", config) for config in choice.techniques if isinstance(config, Off)}
    configs: dict[str, Any] = {}
    notes = []
    for name, technique in catalog().items():
        if name in own:
            reason = technique.why_not(view, own[name])
            if reason is not None:
                raise PipelineError(f"{view.name} cannot have {name}={own[name]!r}: {reason}")
            configs[name] = own[name]
        elif name in inherited and name not in left_out:
            config = inherited[name]
            reason = _conflict(choice, {**configs, **own, name: config})
            if reason is not None and technique.is_required:
                raise PipelineError(f"{view.name} cannot have {name}={config!r}: {reason}")
            reason = reason or technique.why_not(view, config)
            if reason is None:
                configs[name] = config
            elif plan.names(name) and choice.how != "eager":
                notes.append(f"without {name}: {reason}")
    return configs, notes


def _conflict(choice: Choice, configs: Mapping[str, Any]) -> str | None:
    try:
        Choice(how=choice.how, techniques=configs.values())
    except ConfigError as error:
        return str(error)
    return None


def variants(view: View, plan: Plan) -> list[Choice]:
    """Return the choices that techniques propose to try on a part that Tritium compiles."""
    inherited = plan.inherited()
    found = []
    for name, technique in catalog().items():
        for config in technique.variants(view):
            fits = config != inherited.get(name) and technique.why_not(view, config) is None
            if fits and _conflict(Choice(), {**inherited, name: config}) is None:
                found.append(Choice(techniques=(config,)))
    return found
