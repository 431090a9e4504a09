"""From the ranks of `torch.distributed` to one process group per axis of the mesh."""

from __future__ import annotations

import atexit
import functools
import gc
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tritium import compat
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.parallel.config import AXES, Parallel


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as one rank sees it: its process group, its place in it, and the group's size."""

    name: str
    size: int
    rank: int = 0
    # None where the size is 1.
    group: Any = field(default=None, compare=False)

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks of the group."""
        return dist.get_process_group_ranks(self.group) if self.group is not None else []


@dataclass(frozen=True)
class Mesh:
    """The axes of all ranks. `world` is an axis of all ranks, which the VAE uses."""

    axes: Mapping[str, Axis]
    world: Axis

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def __str__(self) -> str:
        split = [f"{axis.name}={axis.size}" for axis in self.axes.values() if axis.size > 1]
        return f"{' x '.join(split) or 'one rank'} ({self.world.size} ranks)"


def start(device: torch.device) -> None:
    """Start the process group of this world if a launcher has set its variables; raise if there is none."""
    if dist.is_initialized():
        return
    if not dist.is_available() or not dist.is_torchelastic_launched():
        raise PipelineError(
            "Parallel needs several ranks, and this process has no process group; start it with torchrun, or use "
            "`tritium run ... --parallel auto --gpus N`"
        )
    if device.type == "cuda":
        # The launcher numbers the ranks of a machine, and each has one GPU.
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def check(config: Parallel, world: int) -> None:
    """Raise a `ConfigError` if the degrees do not use each rank of the world once."""
    if not config.is_auto and config.size != world:
        degrees = " x ".join(f"{axis}={degree}" for axis, degree in config.degrees.items() if degree > 1) or "1"
        raise ConfigError(
            f"parallel {degrees} uses {config.size} ranks and the world has {world}; {_legal(config, world)}"
        )
    if isinstance(config.vae, int) and world % config.vae:
        raise ConfigError(f"parallel vae={config.vae} does not divide the {world} ranks; give a divisor, or 'auto'")


def _legal(config: Parallel, world: int) -> str:
    """Return the nearest degrees that fit: the largest axis changed, or the ranks to start."""
    named = {axis: degree for axis, degree in config.degrees.items() if degree > 1}
    if named:
        largest = max(named, key=lambda axis: named[axis])
        others = math.prod(degree for axis, degree in named.items() if axis != largest)
        if world % others == 0:
            return f"use {largest}={world // others}, or start {config.size} ranks"
    return f"start {config.size} ranks, or let the cost model choose: Parallel()"


def build(degrees: tuple[int, ...], device_type: str) -> Mesh:
    """Return the mesh of these degrees, in the order of `AXES`; all ranks must call it alike."""
    return _build(degrees, device_type, dist.group.WORLD)


# One mesh per world: a process may destroy its group and start another.
@functools.cache
def _build(degrees: tuple[int, ...], _device_type: str, world: Any) -> Mesh:
    everyone = torch.arange(math.prod(degrees)).reshape(degrees)
    axes = {
        name: _axis(name, everyone.movedim(dim, -1).reshape(-1, degree))
        for dim, (name, degree) in enumerate(_named(degrees))
    }
    return Mesh(axes, _world(world))


def _named(degrees: tuple[int, ...]) -> list[tuple[str, int]]:
    return list(zip(AXES, degrees, strict=True))


@functools.cache
def _world(_world: Any) -> Axis:
    return _axis("world", torch.arange(dist.get_world_size()).reshape(1, -1))


def mesh_of(config: Parallel, device: torch.device) -> Mesh:
    """Return the mesh of a config on the ranks of this world; nothing is split before degrees are named or chosen."""
    check(config, dist.get_world_size())
    if config.is_auto:
        return Mesh({axis: Axis(axis, 1) for axis in AXES}, _world(dist.group.WORLD))
    return build(tuple(config.degrees[axis] for axis in AXES), device.type)


def axis_of(ranks: int, _device: torch.device) -> Axis:
    """Return an axis of consecutive ranks, which repeats over the world; all ranks must call it alike."""
    return _axis_of(ranks, dist.group.WORLD)


@functools.cache
def _axis_of(ranks: int, world: Any) -> Axis:
    size = dist.get_world_size()
    return _world(world) if ranks == size else _axis("vae", torch.arange(size).reshape(-1, ranks))


# --- process groups ---

# The axes with groups, each with the ranks of all groups of the axis, in the order in which they were created.
_axes: list[tuple[Axis, list[list[int]]]] = []


def _axis(name: str, table: torch.Tensor) -> Axis:
    """Return an axis whose groups are the rows of a table of ranks."""
    groups, rank = table.tolist(), dist.get_rank()
    if len(groups[0]) == 1:
        return Axis(name, 1)
    own = next(ranks for ranks in groups if rank in ranks)
    axis = Axis(name, len(own), own.index(rank), _group(name, groups))
    _axes.append((axis, groups))
    return axis


def _group(name: str, groups: list[list[int]]) -> Any:
    """Create the groups of an axis, and return this rank's.

    They are new ones also for all ranks: `abandon` must leave the group that the user created alone.
    """
    created = [dist.new_group(ranks, group_desc=f"tritium {name}") for ranks in groups]
    return next(group for group, ranks in zip(created, groups, strict=True) if dist.get_rank() in ranks)


# The variable, and the argument of `getrefcount`.
_OWN_REFERENCES = 2


def abandon() -> None:
    """Destroy the groups, so that ranks that wait in one of their collectives raise."""
    is_held = False
    for axis, _ in _axes:
        group = axis.group
        object.__setattr__(axis, "group", None)
        if group is not None:
            compat.collectives.abandon(group)
        is_held |= sys.getrefcount(group) > _OWN_REFERENCES
        del group
    if is_held:
        # Connections close with the last reference.
        gc.collect()


def renew() -> None:
    """Create the groups again after `abandon`; all ranks must call it alike."""
    abandon()
    for axis, groups in _axes:
        object.__setattr__(axis, "group", _group(axis.name, groups))
