"""Choose the mesh of ranks at the first call of a denoiser, whose arguments say how much work a call is."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tritium import compat, device, models
from tritium.errors import PipelineError
from tritium.pipelines.applied import Settings, View
from tritium.pipelines.part import Part
from tritium.pipelines.parts import KEPT, modules_of
from tritium.techniques.choice import Choice
from tritium.techniques.memory.config import gigabytes
from tritium.techniques.memory.units import module_bytes
from tritium.techniques.parallel import experts, sequence, tensor
from tritium.techniques.parallel.config import AXES, SEQUENCE, Parallel
from tritium.techniques.parallel.cost import Decision, Estimate, choose
from tritium.techniques.parallel.links import rates
from tritium.techniques.parallel.work import work_of

# Meshes that are measured, and the calls of each: one that compiles, one more, and those that are timed.
_BEST, _WARM, _TIMED = 3, 2, 3

Decide = Callable[[tuple[Any, ...], dict[str, Any]], None]


def decision(part: Part, choice: Choice, pipe: Any, handle: Any = None) -> Decide | None:
    """Return the function that chooses a denoiser's mesh at its first call, or None if its degrees are named."""
    config = part.check(choice, part.plan, handle)[0].get("parallel")
    if part.name not in KEPT or config is None or not config.is_auto or dist.get_world_size() == 1:
        return None

    def decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked = part.choice
        others = sum(module_bytes(module) for module in modules_of(pipe).values() if module is not part.module)
        found = _ranked(part, args, kwargs, others)
        if part.plan.measure:
            found = _measured(part, config, asked, found, (args, kwargs))
        _use(part, asked, found.best, config)
        part.mesh = found
        part.why = f"{found.best.mesh}: {found.why}"

    return decide


def _ranked(part: Part, args: tuple[Any, ...], kwargs: dict[str, Any], others: int) -> Decision:
    module = part.module
    where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    branches = models.branches_of(type(module).__name__)
    work = work_of(module, args, kwargs, branches, others)
    world = dist.get_world_size()
    found = choose(work, rates(where), world, axes_of(part, world, branches))
    if not found.ranked:
        reasons = "; ".join(f"{one.mesh}: {one.declined}" for one in found.dropped[:3])
        raise PipelineError(
            f"no mesh of {world} ranks fits {type(module).__name__} ({reasons or 'it cannot be split'}); name its degrees, "
            "or start other ranks"
        )
    return found


def axes_of(part: Part, world: int, branches: int) -> tuple[str, ...]:
    """Return the axes by which a denoiser can be split."""
    module = part.module
    view = View(part, Settings(part.choice.how, part.plan.config))
    divisors = [size for size in range(2, world + 1) if world % size == 0]
    able = {
        "cfg": branches > 1,
        **dict.fromkeys(SEQUENCE, sequence.why_not(view) is None),
        "experts": experts.why_not(module) is None,
        "tensor": any(tensor.why_not(module, size) is None for size in divisors),
    }
    return tuple(axis for axis in AXES if able[axis])


def _use(part: Part, asked: Choice, mesh: Estimate, config: Parallel) -> None:
    part.use(asked.with_(parallel=mesh.config(config.vae)))


# --- measuring ---


def _measured(
    part: Part, config: Parallel, asked: Choice, found: Decision, call: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> Decision:
    """Time a call on the best meshes, on all ranks alike, and put them in the order of their times."""
    timed = []
    for mesh in found.ranked[:_BEST]:
        _use(part, asked, mesh, config)
        seconds = _seconds(part, call)
        # Every rank has computed all branches: it does not follow the steps of an image.
        calls = -(-found.work.branches // mesh.degrees["cfg"])
        timed.append(dataclasses.replace(mesh, measured=seconds * calls + mesh.exchanges.get("cfg", 0.0)))
        # What a technique has learned from these calls is not kept.
        part.use(Choice(how="eager", parallel=False))
    timed.sort(key=lambda mesh: mesh.measured or 0.0)
    rest = found.ranked[_BEST:]
    return dataclasses.replace(found, ranked=(*timed, *rest), why=f"the fastest of {len(timed)} that were measured")


def _seconds(part: Part, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> float:
    """Return the median seconds of a call on the slowest rank; all ranks make as many calls."""
    taken = []
    for number in range(_WARM + _TIMED):
        args, kwargs = compat.tensors.map_tensors(lambda tensor: tensor, call)
        where = next((parameter.device.type for parameter in part.module.parameters()), "cpu")
        device.synchronize(where)
        dist.barrier()
        start = time.perf_counter()
        part.run(*args, **kwargs)
        device.synchronize(where)
        if number >= _WARM:
            taken.append(time.perf_counter() - start)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, statistics.median(taken))
    return float(max(by_rank))


# --- for the user ---


class Meshes:
    """The split parts of a pipeline: the mesh of each, the reason, the cost of its axes, and the replicated components."""

    def __init__(self, parts: Iterable[Part], pipe: Any) -> None:
        self._parts, self._pipe = list(parts), pipe

    def to_dict(self) -> dict[str, Any]:
        """Return the mesh and the estimates of every part that is split, and the bytes of what every rank has whole."""
        return {
            "parts": {part.name: self._of(part, note) for part, note in self._split()},
            "replicated": self._replicated(),
        }

    def _split(self) -> Iterable[tuple[Part, Any]]:
        notes = ((part, part.technique_notes.get("parallel")) for part in self._parts)
        return ((part, note) for part, note in notes if note is not None)

    def _of(self, part: Part, note: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"mesh": note.data["mesh"], "splits": note.data["splits"]}
        if (padded := _padded_heads(part, note.data["mesh"])) is not None:
            found["padded_heads"] = padded
        if part.mesh is not None:
            found |= {"why": part.mesh.why, "rates": str(part.mesh.rates)}
            found["estimates"] = [
                {
                    "degrees": {axis: size for axis, size in one.degrees.items() if size > 1},
                    "milliseconds": one.seconds * 1e3,
                    "computing": one.compute * 1e3,
                    "exchanges": {axis: seconds * 1e3 for axis, seconds in one.exchanges.items()},
                    "measured": None if one.measured is None else one.measured * 1e3,
                    "bytes": one.memory,
                    "padding": one.padding,
                }
                for one in part.mesh.ranked
            ]
        return found

    def _replicated(self) -> dict[str, int]:
        split = {part.name.partition(".")[0] for part, note in self._split() if note.data["splits"]}
        return {name: module_bytes(module) for name, module in modules_of(self._pipe).items() if name not in split}

    def __str__(self) -> str:
        lines: list[str] = []
        split = list(self._split())
        if not split:
            return "one rank runs all parts; Plan(parallel=Parallel()) under torchrun splits them"
        for part, note in split:
            if part.mesh is None:
                is_waiting = part.before_first is not None
                why = "the mesh is chosen at the first call" if is_waiting else f"{note.text}; its degrees were named"
                padded = _padded_heads(part, note.data["mesh"])
                why += f"; {padded[0]} heads are padded to {padded[1]}" if padded is not None else ""
                lines.append(f"{part.name}: {why}")
                continue
            lines.append(f"{part.name}: {note.text}")
            lines.append(f"  chosen by {part.mesh.why}: {part.mesh.best}")
            lines += [f"  instead of {other}" for other in part.mesh.ranked[1:3]]
            lines += [f"  not {other}" for other in part.mesh.dropped[:2]]
            lines.append(f"  with {part.mesh.rates}")
        replicated = ", ".join(f"{name} ({gigabytes(size)})" for name, size in self._replicated().items())
        lines.append(f"on every rank: {replicated or 'nothing else'}")
        return "\n".join(lines)


def _padded_heads(part: Part, mesh: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the heads of a denoiser, and those with padding, if its ranks cannot have equal shares; else None."""
    heads = getattr(getattr(part.module, "config", None), "num_attention_heads", None)
    ranks = mesh.get("ulysses", 1)
    if part.name not in KEPT or not isinstance(heads, int) or heads % ranks == 0:
        return None
    return heads, -(-heads // ranks) * ranks
