"""The settings that a user passes to `tritium.optimize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tritium.config import CompilationConfig, check_flag
from tritium.errors import ConfigError
from tritium.pipelines.shapes import Shapes
from tritium.techniques import catalog
from tritium.techniques.choice import HOWS, Choice, Off, check_keywords, collect, name_of


@dataclass(frozen=True, init=False)
class Plan:
    """The settings for a pipeline; `tritium.optimize(pipe)` uses `Plan()`.

    Args:
        config: How Tritium compiles.
        techniques: Configs of techniques for all parts, such as `ChannelsLast()`. Each can be written by its technique's
            name instead: `Plan(graphs="off", channels_last=True)`. A choice in `components` takes precedence. Parts to
            which a technique does not apply go without it, and the summary says why.
        components: A choice by part (`transformer`, `vae.decode`, `text_encoder`, ...); a component's name covers all
            its parts. A string stands for `Choice(how=...)`. Other parts get the default.
        measure: On its first call, time each part eagerly, under torch.compile and under Tritium, and keep the fastest.
        dynamic: As in `torch.compile`: None makes a size dynamic when it changes, False compiles each size.
        blocks: The class names of a denoiser's repeated blocks, by component, for models that Tritium does not support.
        check_memory: Before a decode starts, refuse it if it does not fit the device's free memory.
        progress: Show progress while compiling.
        shapes: The shapes that `handle.warmup()` compiles, each size separately unless `dynamic` is set; later calls
            with these shapes do not compile.

    >>> Plan(components={"vae": "eager"}).choice("vae.decode").how
    'eager'
    """

    config: CompilationConfig
    techniques: tuple[Any, ...]
    components: Mapping[str, Choice]
    measure: bool
    dynamic: bool | None
    blocks: Mapping[str, tuple[str, ...]]
    check_memory: bool
    progress: bool
    shapes: Shapes | None

    def __init__(
        self,
        *positional: Any,
        config: CompilationConfig | None = None,
        techniques: Iterable[Any] = (),
        components: Mapping[str, Choice | str] = MappingProxyType({}),
        measure: bool = False,
        dynamic: bool | None = None,
        blocks: Mapping[str, Sequence[str] | str] = MappingProxyType({}),
        check_memory: bool = True,
        progress: bool = True,
        shapes: Shapes | None = None,
        **by_name: Any,
    ) -> None:
        check_keywords("Plan", [field.name for field in dataclasses.fields(self)], positional, by_name)
        config = CompilationConfig() if config is None else config
        if shapes is not None and not isinstance(shapes, Shapes):
            raise ConfigError(f"Plan.shapes takes a Shapes, got {type(shapes).__name__}")
        if not isinstance(config, CompilationConfig):
            raise ConfigError(f"Plan.config takes a CompilationConfig, got {type(config).__name__}")
        for name, flag in (("measure", measure), ("check_memory", check_memory), ("progress", progress)):
            check_flag(f"Plan.{name}", flag)
        if dynamic is not None and not isinstance(dynamic, bool):
            raise ConfigError(f"Plan.dynamic must be None, True or False, got {dynamic!r}")
        values = {
            "config": config,
            "techniques": collect("Plan", techniques, by_name),
            "components": _choices(components),
            "measure": measure,
            "dynamic": dynamic,
            "blocks": _blocks(blocks),
            "check_memory": check_memory,
            "progress": progress,
            "shapes": shapes,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        # Raise for techniques that cannot be combined, and for those that contradict the configuration.
        Choice(techniques=self.inherited().values())
        for choice in self.components.values():
            for name, own in choice.configs().items():
                catalog()[name].reconcile(own, config)

    def choice(self, part: str) -> Choice | None:
        """Return the requested choice for a part, by its name or its component's; None if there is none."""
        return self.components.get(part) or self.components.get(part.partition(".")[0])

    def inherited(self) -> dict[str, Any]:
        """Return the techniques of parts whose choice has none, by name: the plan's, else the default ones."""
        named = {name_of("Plan", config): config for config in self.techniques}
        configs = {name: named.get(name, technique.default) for name, technique in catalog().items()}
        return {
            name: catalog()[name].reconcile(config, self.config)
            for name, config in configs.items()
            if config is not None and not isinstance(config, Off)
        }

    def names(self, technique: str) -> bool:
        """Return True if the plan itself names a technique, so that parts without it need a reason."""
        return any(name_of("Plan", config) == technique for config in self.techniques)

    def with_(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, **changes)


def _by_component(name: str, value: Any, what: str) -> dict[str, Any]:
    """Return the mapping as a dict, or raise a `ConfigError` that shows the expected form."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"Plan.{name} maps a component's name to {what}, got {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"Plan.{name}: a component is named by a string, got {key!r}")
    return dict(value)


def _choices(value: Any) -> Mapping[str, Choice]:
    given = _by_component("components", value, f"a Choice or one of {', '.join(HOWS)}")
    return MappingProxyType({name: choice_of(name, choice) for name, choice in given.items()})


def choice_of(name: str, value: Any) -> Choice:
    """Return a part's choice from a Choice or a string; raise a `ConfigError` for anything else."""
    if isinstance(value, str):
        return Choice(how=value)  # type: ignore[arg-type]  # checked by Choice
    if not isinstance(value, Choice):
        raise ConfigError(f"{name!r} takes a Choice or one of {', '.join(HOWS)}, got {value!r}")
    return value


def _blocks(value: Any) -> Mapping[str, tuple[str, ...]]:
    given = _by_component("blocks", value, "the class names of its repeated blocks")
    blocks = {name: _class_names(name, classes) for name, classes in given.items()}
    if "vae" in blocks:
        raise ConfigError("Plan.blocks names 'vae', whose encoder and decoder are each compiled as one; leave it out")
    return MappingProxyType(blocks)


def _class_names(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(entry, str) and entry for entry in names):
        raise ConfigError(f"Plan.blocks[{name!r}] takes the class name of a block, or several, got {value!r}")
    return names
