"""The settings that a user passes to `tritium.optimize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from tritium.config import CompilationConfig, check_flag, keywords_only
from tritium.errors import ConfigError, nearest
from tritium.pipelines.shapes import Shapes

How = Literal["tritium", "inductor", "eager"]
HOWS: tuple[How, ...] = get_args(How)

Graphs = Literal["off", "only", "with_compile", "auto"]


@keywords_only
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting for one part of a pipeline.

    `how` selects Tritium, plain torch.compile (`inductor`), or neither (`eager`). `channels_last` converts the part's
    convolution weights to that memory format. `graphs` has the meaning of the field in `CompilationConfig`; None takes
    the plan's setting.
    """

    how: How = "tritium"
    channels_last: bool = False
    graphs: Graphs | None = None

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ConfigError(f"a part cannot run with {self.how!r}; {nearest(str(self.how), HOWS)}")
        check_flag("Choice.channels_last", self.channels_last)
        if self.graphs is not None and self.graphs not in get_args(Graphs):
            raise ConfigError(f"graphs cannot be {self.graphs!r}; {nearest(str(self.graphs), get_args(Graphs))}")
        if self.graphs not in (None, "off") and self.how != "tritium":
            raise ConfigError(f"graphs={self.graphs!r} is Tritium's, and the part runs with {self.how!r}")

    def __str__(self) -> str:
        graphs = f", graphs {self.graphs}" if self.graphs is not None else ""
        return self.how + (", channels-last" if self.channels_last else "") + graphs

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@keywords_only
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings for a pipeline; `tritium.optimize(pipe)` uses `Plan()`.

    Args:
        config: How Tritium compiles.
        graphs: Whether calls are captured and replayed, as in `CompilationConfig`. "auto" decides for each part and
            shape, and captures calls that wait for the host; if the configuration's setting is not "off", that one
            applies.
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

    config: CompilationConfig = field(default_factory=CompilationConfig)
    graphs: Graphs = "auto"
    components: Mapping[str, Choice | str] = field(default_factory=dict)
    measure: bool = False
    dynamic: bool | None = None
    blocks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    check_memory: bool = True
    progress: bool = True
    shapes: Shapes | None = None

    def __post_init__(self) -> None:
        if self.shapes is not None and not isinstance(self.shapes, Shapes):
            raise ConfigError(f"Plan.shapes takes a Shapes, got {type(self.shapes).__name__}")
        if not isinstance(self.config, CompilationConfig):
            raise ConfigError(f"Plan.config takes a CompilationConfig, got {type(self.config).__name__}")
        if self.graphs not in get_args(Graphs):
            raise ConfigError(f"Plan.graphs cannot be {self.graphs!r}; {nearest(str(self.graphs), get_args(Graphs))}")
        if self.graphs not in ("auto", self.config.graphs) and self.config.graphs != "off":
            raise ConfigError(
                f"Plan.graphs is {self.graphs!r} and its configuration says {self.config.graphs!r}; give one"
            )
        for name in ("measure", "check_memory", "progress"):
            check_flag(f"Plan.{name}", getattr(self, name))
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise ConfigError(f"Plan.dynamic must be None, True or False, got {self.dynamic!r}")
        choices = _by_component("components", self.components, f"a Choice or one of {', '.join(HOWS)}")
        choices = {name: choice_of(name, choice) for name, choice in choices.items()}
        blocks = _by_component("blocks", self.blocks, "the class names of its repeated blocks")
        blocks = {name: _class_names(name, classes) for name, classes in blocks.items()}
        if "vae" in blocks:
            raise ConfigError(
                "Plan.blocks names 'vae', whose encoder and decoder are each compiled as one; leave it out"
            )
        object.__setattr__(self, "components", MappingProxyType(choices))
        object.__setattr__(self, "blocks", MappingProxyType(blocks))

    @property
    def captures(self) -> Graphs:
        """Return the capture setting for parts whose choice has none."""
        return self.config.graphs if self.graphs == "auto" and self.config.graphs != "off" else self.graphs

    def choice(self, part: str) -> Choice | None:
        """Return the requested choice for a part, by its name or its component's; None if there is none."""
        found = self.components.get(part) or self.components.get(part.partition(".")[0])
        assert found is None or isinstance(found, Choice)
        return found

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


def choice_of(name: str, value: Any) -> Choice:
    """Return a part's choice from a Choice or a string; raise a `ConfigError` for anything else."""
    if isinstance(value, str):
        return Choice(how=value)  # type: ignore[arg-type]  # checked by Choice
    if not isinstance(value, Choice):
        raise ConfigError(f"{name!r} takes a Choice or one of {', '.join(HOWS)}, got {value!r}")
    return value


def _class_names(name: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(f"Plan.blocks[{name!r}] takes the class name of a block, or several, got {value!r}")
    return names
