"""Give the device memory of a pipeline back, and take it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium.errors import PipelineError
from tritium.pipelines.captures import Captures
from tritium.pipelines.part import Part
from tritium.pipelines.parts import modules_of
from tritium.techniques.memory import Turns
from tritium.techniques.memory.config import gigabytes
from tritium.techniques.memory.link import link_to
from tritium.techniques.memory.units import Unit, plain_tensors, tensors_of


@dataclass(frozen=True)
class Asleep:
    """What `Handle.sleep` gave back: bytes of weights on the device, and captures that have to be made again."""

    weights: int
    captures: int
    units: tuple[Unit, ...]

    def __str__(self) -> str:
        return f"asleep: {gigabytes(self.weights)} of weights given back, {self.captures} captures to be made again"


def sleep(pipe: Any, parts: Sequence[Part], captures_of: Callable[[Part], Captures]) -> Asleep:
    """Move all weights of a pipeline to the host, and free its captures. Calls raise until `wake`."""
    shared = next((part for part in parts if len(part.claims.handles) > 1), None)
    if shared is not None:
        raise PipelineError(
            f"{shared.name} is shared with another pipeline that is optimized too, which would lose its weights; call "
            "remove() on one of the handles first"
        )
    count = 0
    for part in parts:
        captures = captures_of(part)
        part.captured_again = len(captures)
        count += len(captures)
        captures.clear()
        part.pause(f"{part.name} is asleep; call handle.wake() first")
    freed = 0
    for state in _turns(parts):
        freed += state.pool.sleep([state.tenant])
    units = []
    for tensors in _resident(pipe, parts):
        where = tensors[0].device
        unit = Unit.packed("", tensors, link_to(where).host)
        # The memory of one component is free before that of the next one is copied.
        unit.poison(where)
        freed += unit.size
        units.append(unit)
    return Asleep(freed, count, tuple(units))


def wake(parts: Sequence[Part], asleep: Asleep) -> None:
    """Move all weights back. Captures are made again in the next calls."""
    for unit in asleep.units:
        unit.restore()
        link_to(unit.tensors[0].device).forget_host(unit.host)
    for state in _turns(parts):
        state.pool.wake([state.tenant])
    for part in parts:
        part.resume()


def _turns(parts: Sequence[Part]) -> list[Turns]:
    return [state for part in parts if isinstance(state := part.state_of("memory"), Turns)]


def _resident(pipe: Any, parts: Sequence[Part]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that stay on a device, by component and device."""
    seen = {id(tensor) for state in _turns(parts) for s in state.tenant.weights.seats for tensor in s.unit.tensors}
    for module in modules_of(pipe).values():
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in plain_tensors(tensors_of(module)):
            if id(tensor) not in seen and not tensor.is_meta:
                seen.add(id(tensor))
                by_device.setdefault(tensor.device, []).append(tensor)
        yield from by_device.values()
