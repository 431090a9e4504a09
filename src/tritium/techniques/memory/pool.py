"""The budget of a device: which part has its weights there, and how much stays free for activations.

Parts that run at every step get what they need first. Parts that run once an image take their turn in the same memory, in
front, where the slots are: the blocks that stay do not have to be loaded again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritium import compat
from tritium.compiler.capture import copied_results
from tritium.device import is_capturing
from tritium.errors import MemoryShortage, PipelineError, brief
from tritium.techniques.memory.arena import Arena, place
from tritium.techniques.memory.config import FIT, Memory, bytes_of, gigabytes
from tritium.techniques.memory.estimate import MARGIN, WORKSPACE, Peaks, estimate
from tritium.techniques.memory.link import Link, link_to
from tritium.techniques.memory.planning import Demand, Machine
from tritium.techniques.memory.schedule import SLOTS, Block, Schedule, choose
from tritium.techniques.memory.streaming import TIMED_CALL, Streamed

# Stays free of what a device has, if the budget is "fit".
_LEFT = 512 * 2**20

# Another choice of blocks has to save this share of a step: captured code does not survive it.
_WORTH_MOVING = 0.03

# Attempts at a call that runs out of memory, and what its activations are multiplied by each time.
_ATTEMPTS, _MORE = 4, 1.5

# Parts that run in turn with the denoiser at every step.
_BESIDE = "controlnet"

# The share of a budget that is kept for activations if a part cannot be estimated.
_UNKNOWN = 0.15


@dataclass(eq=False)
class Tenant:
    """A part in the pool: its weights, its calls so far, and its schedule."""

    weights: Streamed
    # False for parts that run once an image.
    loops: bool
    # The modules with compiled calls, which an estimate runs eagerly.
    blocks: tuple[Any, ...]
    # Captured code has intermediate values of its own.
    is_captured: bool
    peaks: Peaks = field(default_factory=Peaks)
    work: Mapping[int, float] = field(default_factory=dict)
    other_ms: float = 0.0
    measured: Mapping[int, float] | None = None
    seen: dict[Hashable, int] = field(default_factory=dict)
    schedule: Schedule | None = None
    # Bytes for activations that the schedule leaves free.
    reserve: int = 0
    # Bytes that a call took, where that was more than its estimate.
    grown: dict[Hashable, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    is_estimated: bool = False
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


class Pool:
    """The parts of pipelines that share one budget on one device."""

    def __init__(self, where: torch.device, config: Memory) -> None:
        self.config = config
        self.link: Link = link_to(where)
        self.lock = threading.RLock()
        self.tenants: list[Tenant] = []
        self.arena = Arena(self.link)
        # Arenas of parts that run in turn with others at every step.
        self._own: dict[Tenant, Arena] = {}
        # The most bytes that may stay while a part of the other kind runs.
        self._most_fixed: int | None = None
        self._last: Tenant | None = None
        self._budget: int | None = None

    @property
    def budget(self) -> int:
        """The bytes of the budget; those of "fit" are read once."""
        if self._budget is None:
            capacity = self.link.capacity() if self.config.budget == FIT else None
            if self.config.budget == FIT and capacity is None:
                raise PipelineError("memory='fit' needs the free memory of the device, which is unknown; name a budget")
            self._budget = max(1, capacity - _LEFT) if capacity is not None else bytes_of(self.config.budget)
        return self._budget

    @functools.cached_property
    def machine(self) -> Machine:
        return Machine.of(self.link.device.type, self.link.rate())

    # --- membership ---

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """Move weights inside; writes by other code before it are still noticed."""
        for tenant in self.tenants:
            tenant.weights.note()
        yield
        for tenant in self.tenants:
            tenant.weights.watch()

    def join(self, tenant: Tenant) -> None:
        """Copy the weights of a part to the host; it takes no memory on the device until its first call."""
        with self.lock:
            weights = tenant.weights
            weights.arena = self.arena
            try:
                weights.pack(self.link.host)
                self._refuse_tied(weights)
            except BaseException:
                self._forget_host(weights)
                raise
            for seat in weights.seats:
                seat.leave(self.link.device)
            weights.watch()
            self.tenants.append(tenant)

    def _refuse_tied(self, weights: Streamed) -> None:
        others = {id(tensor) for other in self.tenants for seat in other.weights.seats for tensor in seat.unit.tensors}
        if any(id(tensor) in others for seat in weights.seats for tensor in seat.unit.tensors):
            raise PipelineError(
                f"{weights.name} has weights of another part, and they cannot take turns with themselves; leave it out "
                f"with components={{{weights.name!r}: Choice(memory=False)}}"
            )

    def drop(self, tenant: Tenant) -> None:
        """Put the weights of a part back to where they were."""
        with self.lock, self._placing():
            self.tenants.remove(tenant)
            self._release(tenant)
            if not any(other.schedule for other in self.tenants if other not in self._own):
                self.arena.clear()
            self.link.finish()
            for seat in tenant.weights.seats:
                seat.unit.restore()
            self._forget_host(tenant.weights)

    def _release(self, tenant: Tenant) -> None:
        arena = self._own.pop(tenant, None)
        if arena is not None:
            arena.clear()
        else:
            self.arena.unseat(tenant)
        tenant.schedule = None

    def _forget_host(self, weights: Streamed) -> None:
        for seat in weights.seats:
            self.link.forget_host(seat.unit.host)

    def sleep(self, tenants: Sequence[Tenant]) -> int:
        """Free the memory of parts on the device, whose weights stay on the host; return the bytes."""
        with self.lock, self._placing():
            before = self._held
            for tenant in tenants:
                self._release(tenant)
                tenant.is_asleep = True
            if all(tenant.is_asleep for tenant in self.tenants):
                self.arena.clear()
            return before - self._held

    def wake(self, tenants: Sequence[Tenant]) -> None:
        """Allow calls again; the next one loads the weights."""
        for tenant in tenants:
            tenant.is_asleep = False

    @property
    def _held(self) -> int:
        return sum(arena.held for arena in (self.arena, *self._own.values()))

    # --- calls ---

    def around(self, tenant: Tenant) -> Callable[..., Any]:
        """Return the function around the calls of a part."""

        def run(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_capturing():
                raise PipelineError(
                    f"{tenant.name} is called inside a capture, and loads its weights while it runs (memory); capture with "
                    "graphs='with_compile', which captures each block"
                )
            with self.lock:
                return self._run(tenant, call, args, kwargs)

        return compat.dynamo.untraced(run)

    def _run(self, tenant: Tenant, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for attempt in range(_ATTEMPTS):
            self._enter(tenant, args, kwargs)
            before = self.link.allocated(), self.link.most_allocated(), compat.dynamo.graphs_compiled()
            try:
                with copied_results():
                    tenant.weights.begin()
                    result = call(*args, **kwargs)
                    tenant.weights.end()
            except torch.OutOfMemoryError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self._grow(tenant, args, kwargs, int(tenant.reserve * _MORE), "the device was out of memory")
                continue
            self._leave(tenant, args, kwargs, before)
            return result
        raise AssertionError

    def _leave(self, tenant: Tenant, args: Any, kwargs: Any, before: tuple[int, int, int]) -> None:
        self._last = tenant
        most = self.link.most_allocated()
        # Compiling measures kernels, in memory that later calls do not take.
        if most > max(self.budget, before[1]) and compat.dynamo.graphs_compiled() == before[2]:
            self._grow(tenant, args, kwargs, most - before[0] + WORKSPACE, f"it took {gigabytes(most)}")
        if not tenant.loops and tenant not in self._own:
            # Reading them out of their turn has to show.
            with self._placing():
                for seat in tenant.weights.seats:
                    seat.unit.poison(self.link.device)
        elif tenant.measured is None and tenant.weights.calls > TIMED_CALL:
            tenant.measured = tenant.weights.block_ms()
            if tenant.measured is not None:
                self._choose_again(tenant)

    def _grow(self, tenant: Tenant, args: Any, kwargs: Any, size: int, why: str) -> None:
        """Leave more memory for the activations of a call, from the next one on."""
        key = _key(args, kwargs)
        tenant.grown[key] = max(size, tenant.grown.get(key, 0))
        tenant.notes[f"{gigabytes(size)} for activations, because {why}"] = None
        tenant.schedule = None

    def _choose_again(self, tenant: Tenant) -> None:
        """Choose other blocks to stay if the measured times say that they save something."""
        assert tenant.schedule is not None
        old = tenant.schedule
        blocks, other = self._blocks(tenant), tenant.other_ms
        tenant.schedule = Schedule(blocks, old.resident, old.slots, old.rate, other)
        best = choose(blocks, old.size, old.rate, other, self.config.slots)
        assert best is not None
        if best.step_ms < (1 - _WORTH_MOVING) * tenant.schedule.step_ms:
            tenant.notes["planned again with measured times"] = None
            tenant.schedule = None

    # --- who has the memory ---

    def _enter(self, tenant: Tenant, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if tenant.is_asleep:
            raise PipelineError(f"{tenant.name} is asleep; call handle.wake() first")
        weights = tenant.weights
        if weights.is_rebuilt:
            self._pack_again(tenant)
        weights.check()
        reserve, arena = self._reserve(tenant, args, kwargs), self._own.get(tenant, self.arena)
        is_new = tenant.schedule is None or reserve > tenant.reserve
        if tenant.loops and tenant is self._last and not is_new and arena.held == arena.total:
            return
        tenant.reserve = max(tenant.reserve, reserve) if tenant.loops else reserve
        with self._placing():
            if not tenant.loops:
                self._enter_once(tenant)
            elif tenant.name.startswith(_BESIDE):
                self._enter_beside(tenant)
            else:
                self._enter_loop(tenant, is_new=is_new)

    def _pack_again(self, tenant: Tenant) -> None:
        tenant.weights.check(addresses=False)
        with self._placing():
            tenant.weights.pack(self.link.host)
            tenant.notes["weights were added or replaced: copied to the host again"] = None
            self._release(tenant)
            for seat in tenant.weights.seats:
                seat.leave(self.link.device)

    def _room(self, arena: Arena) -> int:
        """Return the bytes for an arena and activations: the budget without all other tensors."""
        return self.budget - (self.link.allocated() - arena.held)

    def _enter_loop(self, tenant: Tenant, *, is_new: bool) -> None:
        room, arena = self._room(self.arena), self.arena
        # Small tensors of the caller come and go.
        fits = arena.total + tenant.reserve <= room + self._workspace // 2
        if is_new or not fits or tenant not in arena.seated:
            self._seat_loop(tenant, room)
        elif arena.held < arena.total:
            try:
                arena.reach()
                tenant.weights.seated()
            except torch.OutOfMemoryError:
                tenant.notes["memory that another part had was not free again: planned with less"] = None
                self._seat_loop(tenant, arena.cut + tenant.reserve)

    def _seat_loop(self, tenant: Tenant, room: int) -> None:
        """Choose the blocks that stay, and give all units their ranges; in the memory that is there if it suffices."""
        demand = Demand(tenant.name, self._blocks(tenant), tenant.rest, tenant.reserve, tenant.other_ms)
        tenant.schedule = schedule = demand.schedule(room, self.machine, self.config.slots)
        lead = self._lead(schedule, room - tenant.reserve - tenant.rest - schedule.size)
        ends = self._ranges(tenant, lead)
        limit = ends[-1] if self._most_fixed is None else self._most_fixed
        cut = max([end for end in [lead, *ends] if end <= limit], default=0)
        arena = self.arena
        arena.moves += arena.total > 0
        is_enough = cut == arena.cut if arena.cut < arena.total else arena.total <= limit
        if not (is_enough and ends[-1] <= arena.total <= room - tenant.reserve and arena.held == arena.total):
            self._clear()
            arena.resize(ends[-1], cut)
        self._seat(tenant, arena)

    def _ranges(self, tenant: Tenant, lead: int) -> list[int]:
        schedule, seats = tenant.schedule, tenant.weights.seats
        assert schedule is not None
        slots = [seats[1 + number] for number in schedule.streamed]
        stay = [seats[0], *(seats[1 + number] for number in sorted(schedule.resident))]
        return place(lead, slots, min(schedule.slots, len(slots)), schedule.slot_size, stay)

    def _seat(self, tenant: Tenant, arena: Arena) -> None:
        arena.seat(tenant, tenant.weights.seats)
        tenant.weights.arena = arena
        tenant.weights.seated()

    def _lead(self, schedule: Schedule, space: int) -> int:
        """Return the bytes in front: the slots, or more if what runs once an image needs it and it is free."""
        slots = _slots_of(schedule)
        wanted = max((self._least(other)[1] for other in self.tenants if not other.loops), default=0)
        return wanted if slots < wanted <= slots + space else slots

    def _clear(self) -> None:
        """Free the arena; parts in it are seated again at their next call."""
        for tenant in self.tenants:
            if tenant in self.arena.seated and not tenant.loops:
                tenant.schedule = None
        self.arena.clear()

    def _enter_beside(self, tenant: Tenant) -> None:
        """Give a part that runs at every step, in turn with another one, memory of its own."""
        if tenant in self._own and tenant.schedule is not None:
            return
        arena = self._own.setdefault(tenant, Arena(self.link))
        room, is_small = self._room(arena), tenant.weights.size <= _UNKNOWN * self.budget
        if not is_small:
            # The other part is planned again, with less.
            self._clear()
            room = self._room(arena)
        demand = Demand(tenant.name, self._blocks(tenant), tenant.rest, tenant.reserve, tenant.other_ms)
        tenant.schedule = demand.schedule(room, self.machine, self.config.slots, streams_all=not is_small)
        total = self._ranges(tenant, _slots_of(tenant.schedule))[-1]
        arena.resize(total, total)
        self._seat(tenant, arena)
        self._last = None

    def _enter_once(self, tenant: Tenant) -> None:
        room, arena = self._room(self.arena), self.arena
        schedule, size = self._least(tenant)
        if arena.cut < size or arena.held + tenant.reserve > room + self._workspace // 2:
            arena.shrink()
        if arena.cut < size or arena.held + tenant.reserve > room + self._workspace // 2:
            self._make_room(tenant, size, room)
        if tenant.schedule != schedule or tenant not in arena.seated:
            tenant.schedule = schedule
            self._ranges(tenant, _slots_of(schedule))
            self._seat(tenant, arena)
            return
        for seat in tenant.weights.seats:
            assert seat.buffer is not None
            seat.unit.bind(seat.buffer)

    def _make_room(self, tenant: Tenant, size: int, room: int) -> None:
        """Free the arena for a part that runs once an image; from now on the others leave enough free for it."""
        if size + tenant.reserve > room:
            raise MemoryShortage(
                f"{tenant.name} does not fit into {gigabytes(self.budget)}: it needs {gigabytes(size)} of weights and "
                f"{gigabytes(tenant.reserve)} for activations, and {gigabytes(room)} are not taken by other tensors; give "
                "a larger budget, a smaller image, or enable tiling or slicing of the VAE"
            )
        if self.arena.total:
            self._most_fixed = min(max(room - tenant.reserve, size), self._most_fixed or room)
            tenant.notes[f"other parts leave {gigabytes(tenant.reserve)} free for its activations"] = None
        self._clear()
        self.arena.resize(size, size)

    def _least(self, tenant: Tenant) -> tuple[Schedule, int]:
        """Return the schedule of least memory of a part, and its bytes: whole if it is no more than the slots are."""
        blocks = self._blocks(tenant)
        count = min(self.config.slots or min(SLOTS), len(blocks))
        streams = Schedule(blocks, frozenset(), count, self.machine.rate)
        whole = Schedule(blocks, frozenset(range(len(blocks))), 0, self.machine.rate)
        slots = max((_slots_of(other.schedule) for other in self.tenants if other.loops and other.schedule), default=0)
        found = whole if tenant.weights.size <= max(slots, streams.size + tenant.rest) else streams
        return found, found.size + tenant.rest

    def _blocks(self, tenant: Tenant) -> tuple[Block, ...]:
        return tenant.blocks_of(self.machine)

    # --- activations ---

    @property
    def _workspace(self) -> int:
        return min(WORKSPACE, self.budget // 16)

    def _reserve(self, tenant: Tenant, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the bytes that a call needs for its activations: estimated, or from the line through two estimates."""
        key = _key(args, kwargs)
        if key not in tenant.seen:
            size = _size(args, kwargs)
            peak = tenant.peaks.at(size) if tenant.is_estimated else None
            tenant.seen[key] = peak if peak is not None else self._estimated(tenant, args, kwargs, size)
        # The intermediate values of captured code are in a pool of their own.
        found = int(tenant.seen[key] * MARGIN) * (2 if tenant.is_captured else 1) + self._workspace
        return max(found, tenant.grown.get(key, 0))

    def _estimated(self, tenant: Tenant, args: Any, kwargs: Mapping[str, Any], size: int) -> int:
        weights, is_first = tenant.weights, not tenant.is_estimated
        tenant.is_estimated = True
        blocks = list(dict.fromkeys([*weights.blocks, *tenant.blocks]))
        try:
            found = estimate(weights.module, args, kwargs, blocks)
        except Exception as error:  # noqa: BLE001 - a failed estimate must not prevent a call
            tenant.notes[f"activations not estimated ({brief(error)})"] = None
            return int(_UNKNOWN * self.budget)
        tenant.peaks.add(size, found.peak)
        if is_first:
            flops = dict(zip(blocks, found.of_blocks, strict=True))
            places = {block: number for number, block in enumerate(weights.blocks)}
            weights.order_by([places[blocks[number]] for number in found.order if blocks[number] in places])
            tenant.work = {number: flops[block] for number, block in enumerate(weights.blocks)}
            tenant.other_ms = self.machine.ms(found.flops - sum(tenant.work.values()))
        return found.peak


def _slots_of(schedule: Schedule) -> int:
    """Return the bytes of all slots."""
    return min(schedule.slots, len(schedule.streamed)) * schedule.slot_size


def _key(args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    leaves = compat.tensors.leaves_of((args, dict(kwargs)))
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _size(args: Any, kwargs: Mapping[str, Any]) -> int:
    leaves = compat.tensors.leaves_of((args, dict(kwargs)))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


_POOLS: dict[tuple[torch.device, Memory], Pool] = {}


def pool_of(where: torch.device, config: Memory) -> Pool:
    """Return the pool of a budget; equal budgets of a process are one."""
    return _POOLS.setdefault((where, config), Pool(where, config))
