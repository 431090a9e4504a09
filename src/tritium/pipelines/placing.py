"""Place the weights that belong to no part on the device of the parts that take turns there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tritium.pipelines.part import Part
from tritium.pipelines.parts import modules_of
from tritium.techniques.memory import Turns, device_of
from tritium.techniques.memory.units import moved, tensors_of


def place(pipe: Any, parts: Iterable[Part]) -> Callable[[], None]:
    """Move what runs outside of parts, such as a VAE's layers around its decoder; return a function that moves it back.

    Parts without a budget are moved too, as a whole. Nothing moves in a pipeline without one.
    """
    parts = list(parts)
    turns = [part for part in parts if isinstance(part.state_of("memory"), Turns)]
    if not turns:
        return lambda: None
    where = device_of(turns[0].module)
    own = {id(tensor) for part in turns for tensor in tensors_of(part.module)}
    modules = modules_of(pipe).values()
    others = {id(tensor): tensor for module in modules for tensor in tensors_of(module) if id(tensor) not in own}
    return moved(others.values(), where)
