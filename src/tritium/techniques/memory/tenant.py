"""A part in a pool: its weights, its schedule, and the memory that its calls need."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import brief
from tritium.techniques.memory.estimate import MARGIN, Peaks, estimate
from tritium.techniques.memory.planning import Machine
from tritium.techniques.memory.schedule import Block, Schedule
from tritium.techniques.memory.streaming import Streamed


@dataclass(eq=False)
class Tenant:
    """A part in the pool: its weights, its calls so far, and its schedule."""

    weights: Streamed
    # False for parts that run once an image.
    loops: bool
    # The modules with compiled calls, which an estimate runs eagerly.
    blocks: tuple[nn.Module, ...]
    # Captured code has separate intermediate values.
    is_captured: bool
    peaks: Peaks = field(default_factory=Peaks)
    work: Mapping[int, float] = field(default_factory=dict)
    other_ms: float = 0.0
    measured: Mapping[int, float] | None = None
    seen: dict[Hashable, int] = field(default_factory=dict)
    schedule: Schedule | None = None
    # Bytes for activations that the schedule leaves free.
    reserve: int = 0
    # Bytes that a call needs, where that was more than its estimate.
    grown: dict[Hashable, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    is_estimated: bool = False
    # True if its next call has to be planned again.
    is_stale: bool = False
    is_asleep: bool = False

    @property
    def name(self) -> str:
        return self.weights.name

    @property
    def rest(self) -> int:
        """The bytes of the weights outside of the blocks."""
        return self.weights.rest.unit.size

    def blocks_of(self, machine: Machine) -> tuple[Block, ...]:
        """Return size and time of each block: measured, else from its operations."""
        times = self.measured or {place: machine.ms(flops) for place, flops in self.work.items()}
        seats = self.weights.seats[1:]
        return tuple(Block(seat.unit.size, times.get(place, 0.0), seat.unit.name) for place, seat in enumerate(seats))

    def grow(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int) -> None:
        """Note that a call needs more than was estimated."""
        key = _key(args, kwargs)
        self.grown[key] = max(size, self.grown.get(key, 0))

    def needs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], machine: Machine, unknown: int) -> int:
        """Return the bytes of a call's activations: estimated, or from the line through two estimates.

        `unknown` is returned for a part that cannot run on fake tensors.
        """
        key = _key(args, kwargs)
        if key not in self.seen:
            size = sum(leaf.numel() for leaf in _tensors(args, kwargs))
            peak = self.peaks.at(size) if self.is_estimated else None
            self.seen[key] = self._estimated(args, kwargs, size, machine, unknown) if peak is None else peak
        # The intermediate values of captured code are in a separate pool.
        found = int(self.seen[key] * MARGIN) * (2 if self.is_captured else 1)
        return max(found, self.grown.get(key, 0))

    def _estimated(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int, machine: Machine, unknown: int
    ) -> int:
        weights, is_first = self.weights, not self.is_estimated
        self.is_estimated = True
        blocks = list(dict.fromkeys([*weights.blocks, *self.blocks]))
        try:
            found = estimate(weights.module, args, kwargs, blocks)
        except Exception as error:  # noqa: BLE001 - a failed estimate must not prevent a call
            self.notes[f"activations not estimated ({brief(error)})"] = None
            return unknown
        self.peaks.add(size, found.peak)
        if is_first:
            flops = dict(zip(blocks, found.of_blocks, strict=True))
            places = {block: number for number, block in enumerate(weights.blocks)}
            weights.order_by([places[blocks[number]] for number in found.order if blocks[number] in places])
            self.work = {number: flops[block] for number, block in enumerate(weights.blocks)}
            self.other_ms = machine.ms(found.flops - sum(self.work.values()))
        return found.peak


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in compat.tensors.leaves_of((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    return tuple((leaf.shape, leaf.dtype) for leaf in _tensors(args, kwargs))
