"""Compute routed mixtures of experts as grouped products: one graph, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tritium.config import keywords_only
from tritium.errors import ConfigError
from tritium.techniques.experts import patches
from tritium.techniques.experts.mixture import Routed, find, group, ungroup
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Experts", "group_all"]


@keywords_only
@dataclass(frozen=True, kw_only=True)
class Experts:
    """Group the tokens of routed mixtures by expert on the device, and multiply the groups at once.

    The arguments are for `Parallel(experts=...)`, which splits experts over ranks.

    Args:
        slots: Experts that a rank holds of each mixture; None is an equal share. More slots hold copies of the experts
            with the highest loads.
        moves: Experts of a mixture that may move between ranks after an image, by its loads; None is any number.
    """

    slots: int | None = None
    moves: int | None = 0

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("moves", 0)):
            value: Any = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(
                    f"experts {name}={value!r} is no number of experts; give None or a number from {least}"
                )

    def __str__(self) -> str:
        return "grouped experts"


@dataclass
class State:
    """The mixtures that are grouped, and those that stay as they are with the reason."""

    grouped: list[Routed] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    has_patches: bool = False


def group_all(module: nn.Module) -> None:
    """Group the mixtures of a model on fake tensors for good: stock forwards read values, which it has not."""
    for routed in list(find(module)):
        group(routed)
    patches.count_on_host(module)


def applies_to(part: Part, _config: Experts) -> str | None:
    if part.how != "tritium":
        return f"it runs with {part.how!r}, as it is"
    if part.config.fidelity == "exact":
        return "grouped products sum in another order than the products of single experts"
    return None if next(find(part.module), None) is not None else "it has no routed experts"


def apply(part: Part, config: Experts) -> State:
    # Dynamo may reuse code of a module whose class was another one.
    part.compile_with(apart="experts")
    state = State()
    try:
        for routed in list(find(part.module)):
            reason = group(routed, config.slots, config.moves)
            if reason is None:
                state.grouped.append(routed)
            else:
                state.left[routed.path] = reason
        state.has_patches = patches.count_on_host(part.module)
    except BaseException:
        remove(part, state)
        raise
    return state


def remove(part: Part, state: State) -> None:
    if state.has_patches:
        patches.restore(part.module)
    while state.grouped:
        ungroup(state.grouped.pop())


def report(_part: Part, _config: Experts, state: State) -> Note:
    first = state.grouped[0].module if state.grouped else None
    counts = f"mixtures with {len(first.experts)} experts as grouped products: {len(state.grouped)}" if first else ""
    words = "; ".join(
        [*([counts] if counts else []), *(f"{path} as it was: {why}" for path, why in state.left.items())]
    )
    data: dict[str, Any] = {"grouped": [routed.path for routed in state.grouped], "left": dict(state.left)}
    return Note(words, data)


TECHNIQUE = Technique(
    name="experts",
    config=Experts,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    report=report,
    default=Experts(),
)
