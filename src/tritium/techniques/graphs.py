"""Capture the calls of a part as static graphs and replay them. The backend captures; this sets its mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tritium.compiler.capture import auto
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, nearest
from tritium.techniques.choice import Choice
from tritium.techniques.technique import Note, Part, Technique

Mode = Literal["off", "only", "with_compile", "auto"]


@dataclass(frozen=True)
class Graphs:
    """Which calls are captured and replayed, as `graphs` in `CompilationConfig`."""

    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"graphs cannot be {self.mode!r}; {nearest(str(self.mode), get_args(Mode))}")

    def __str__(self) -> str:
        return f"graphs {self.mode}"


def applies_to(_part: Part, _config: Graphs) -> str | None:
    return None


def apply(part: Part, config: Graphs) -> None:
    # mode="off" may stand in a plan whose other parts run eagerly.
    if part.how == "tritium":
        part.compile_with(graphs=config.mode)


def remove(_part: Part, _state: None) -> None:
    """Do nothing: the part drops the setting."""


def conflicts(config: Graphs, choice: Choice) -> str | None:
    if config.mode == "off" or choice.how == "tritium":
        return None
    return f"graphs={config.mode!r} is Tritium's, and the part runs with {choice.how!r}; leave one of them out"


def reconcile(config: Graphs, compilation: CompilationConfig) -> Graphs:
    if compilation.graphs in ("off", config.mode):
        return config
    if config.mode == "auto":
        return Graphs(compilation.graphs)
    raise ConfigError(
        f"Plan.graphs is {config.mode!r} and its configuration says {compilation.graphs!r}; give one of them"
    )


def settles_after(part: Part, config: Graphs) -> int:
    """Return the calls after which "auto" has decided; only a GPU waits for the host."""
    decides = config.mode == "auto" and any(parameter.is_cuda for parameter in part.module.parameters())
    return auto.CALLS_TO_DECIDE if decides else 1


def report(_part: Part, config: Graphs, _state: None) -> Note:
    # The report lists each capture, so the summary needs no words.
    return Note("", {"mode": config.mode})


TECHNIQUE = Technique(
    name="graphs",
    config=Graphs,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    report=report,
    default=Graphs("auto"),
    reconcile=reconcile,
    settles_after=settles_after,
)
