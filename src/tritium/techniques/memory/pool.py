"""The budget of a device: which part has its weights there, and how much stays free for activations.

Parts that run at every step get what they need first. Parts that run once an image take their turn in the same memory, in
front, where the slots are: the blocks that stay do not have to be loaded again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tritium import compat
from tritium.compiler.capture import copied_results
from tritium.device import is_capturing
from tritium.errors import MemoryShortage, PipelineError
from tritium.techniques.memory.arena import Arena, place
from tritium.techniques.memory.config import FIT, Memory, bytes_of, gigabytes
from tritium.techniques.memory.estimate import WORKSPACE
from tritium.techniques.memory.link import Link, link_to
from tritium.techniques.memory.planning import Demand, Machine
from tritium.techniques.memory.schedule import SLOTS, Block, Schedule, choose
from tritium.techniques.memory.streaming import TIMED_CALL, Streamed
from tritium.techniques.memory.tenant import Tenant
from tritium.techniques.memory.units import Place

# Bytes of the device that a budget of "fit" leaves free.
_LEFT = 512 * 2**20

# Another choice of blocks has to save this share of a step: captured code does not survive it.
_WORTH_MOVING = 0.03

# Attempts at a call that runs out of memory, and the factor for its activations each time.
_ATTEMPTS, _MORE = 4, 1.5

# Calls of a part after which its memory is compared with the budget.
_WATCHED_CALLS = 16

_NOT_FREE = "memory of the budget was not free: planned with less"

# The share of the memory that is tried next if it cannot be allocated in one piece.
_LESS = 0.9

# Parts that run in turn with the denoiser at every step.
_BESIDE = "controlnet"

# The share of a budget that is kept for activations if a part cannot be estimated.
_UNKNOWN = 0.15


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

    @property
    def places(self) -> Iterator[Place]:
        """Return every weight that takes turns here."""
        return (place for one in self.tenants for seat in one.weights.seats for place in seat.unit.places)

    def _refuse_tied(self, weights: Streamed) -> None:
        others = {id(place.tensor) for place in self.places}
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
            before = self._counts(tenant)
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

    def _counts(self, tenant: Tenant) -> tuple[int, int, int] | None:
        """Return bytes, most bytes, and compiled graphs so far, in the first calls of a part: they take time to read."""
        if tenant.weights.calls > _WATCHED_CALLS:
            return None
        return self.link.allocated(), self.link.most_allocated(), compat.dynamo.graphs_compiled()

    def _leave(self, tenant: Tenant, args: Any, kwargs: Any, before: tuple[int, int, int] | None) -> None:
        self._last = tenant
        most = self.link.most_allocated() if before is not None else 0
        # Compiling measures kernels, in memory that later calls do not take.
        if before is not None and most > max(self.budget, before[1]) and compat.dynamo.graphs_compiled() == before[2]:
            self._grow(tenant, args, kwargs, most - before[0], f"it took {gigabytes(most)}")
        if not tenant.loops and tenant not in self._own:
            # Reading them out of their turn has to show.
            with self._placing():
                self.arena.hide(tenant)
        elif tenant.measured is None and tenant.weights.calls > TIMED_CALL:
            tenant.measured = tenant.weights.block_ms()
            if tenant.measured is not None:
                self._choose_again(tenant)

    def _grow(self, tenant: Tenant, args: Any, kwargs: Any, size: int, why: str) -> None:
        """Leave more memory for the activations of a call, from the next one on."""
        tenant.grow(args, kwargs, size)
        tenant.notes[f"{gigabytes(size)} for activations, because {why}"] = None
        tenant.is_stale = True

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
            tenant.is_stale = True

    # --- who has the memory ---

    def _enter(self, tenant: Tenant, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if tenant.is_asleep:
            raise PipelineError(f"{tenant.name} is asleep; call handle.wake() first")
        weights = tenant.weights
        if weights.is_rebuilt:
            self._pack_again(tenant)
        weights.check()
        reserve = tenant.needs(args, kwargs, self.machine, int(_UNKNOWN * self.budget)) + self._workspace
        arena = self._own.get(tenant, self.arena)
        is_new = tenant.schedule is None or tenant.is_stale or reserve > tenant.reserve
        if tenant.loops and tenant is self._last and not is_new and arena.held == arena.total:
            return
        tenant.reserve = max(tenant.reserve, reserve) if tenant.loops else reserve
        tenant.is_stale = False
        with self._placing():
            if not tenant.loops:
                self._enter_once(tenant)
            elif tenant.name.startswith(_BESIDE):
                self._enter_beside(tenant, is_new=is_new)
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
        if is_new or arena.total + tenant.reserve > room + self._slack or tenant not in arena.seated:
            self._seat_loop(tenant, room)
        elif not self._reach(tenant):
            self._seat_loop(tenant, arena.cut + tenant.reserve)
        arena.show(tenant)

    def _reach(self, tenant: Tenant) -> bool:
        """Allocate what another part needed; return False if it is not free again."""
        try:
            self.arena.reach()
        except torch.OutOfMemoryError:
            tenant.notes[_NOT_FREE] = None
            return False
        return True

    def _seat_loop(self, tenant: Tenant, room: int) -> None:
        """Choose the blocks that stay, and give all units their ranges; in the memory that is there if it suffices."""
        tenant.schedule = schedule = self._demand(tenant).schedule(room, self.machine, self.config.slots)
        lead = self._lead(schedule, room - tenant.reserve - tenant.rest - schedule.size)
        arena = self.arena
        ends = self._ranges(tenant, lead)
        limit = ends[-1] if self._most_fixed is None else self._most_fixed
        cut = max([end for end in ends if end <= limit], default=0)
        if arena.cut == cut or (arena.cut == arena.total <= limit):
            ends = self._ranges(tenant, lead, arena.cut)
        else:
            ends.append(arena.total + 1)
        if not (ends[-1] <= arena.total <= room - tenant.reserve and arena.held == arena.total):
            ends = self._ranges(tenant, lead)
            self._clear()
            try:
                arena.resize(ends[-1], cut)
            except torch.OutOfMemoryError:
                # What is free is in pieces, or belongs to other programs.
                tenant.notes[_NOT_FREE] = None
                self._seat_loop(tenant, int(_LESS * room))
                return
        self._seat(tenant, arena)

    def _ranges(self, tenant: Tenant, lead: int = 0, cut: int = 0) -> list[int]:
        schedule, seats = tenant.schedule, tenant.weights.seats
        assert schedule is not None
        slots = [seats[1 + number] for number in schedule.streamed]
        stay = [seats[0], *(seats[1 + number] for number in sorted(schedule.resident))]
        return place(lead, slots, min(schedule.slots, len(slots)), schedule.slot_size, stay, cut)

    def _seat(self, tenant: Tenant, arena: Arena) -> None:
        arena.seat(tenant, tenant.weights.seats)
        tenant.weights.arena = arena
        tenant.weights.seated()

    def _lead(self, schedule: Schedule, space: int) -> int:
        """Return the bytes in front: the slots, or more if parts that run once an image need it and it is free."""
        slots = _slots_of(schedule)
        wanted = max((self._least(other)[1] for other in self.tenants if not other.loops), default=0)
        return wanted if slots < wanted <= slots + space else slots

    def _clear(self) -> None:
        """Free the arena; parts in it are seated again at their next call."""
        for tenant in self.tenants:
            if tenant in self.arena.seated and not tenant.loops:
                tenant.schedule = None
        self.arena.clear()

    def _enter_beside(self, tenant: Tenant, *, is_new: bool) -> None:
        """Give a part that runs at every step, in turn with another one, separate memory."""
        if tenant in self._own and not is_new:
            return
        arena = self._own.setdefault(tenant, Arena(self.link))
        room, is_small = self._room(arena), tenant.weights.size <= _UNKNOWN * self.budget
        if not is_small:
            # The other part is planned again, with less.
            self._clear()
            room = self._room(arena)
        tenant.schedule = self._demand(tenant).schedule(room, self.machine, self.config.slots, streams_all=not is_small)
        total = self._ranges(tenant)[-1]
        arena.resize(total, total)
        self._seat(tenant, arena)
        arena.show(tenant)
        self._last = None

    def _enter_once(self, tenant: Tenant) -> None:
        room, arena = self._room(self.arena) + self._slack - tenant.reserve, self.arena
        schedule, size = self._least(tenant)
        is_seated = tenant.schedule == schedule and tenant in arena.seated
        tenant.schedule = schedule
        end = max(seat.end for seat in tenant.weights.seats) if is_seated else self._ranges(tenant, 0, arena.cut)[-1]
        if not (end <= arena.cut and arena.held <= room):
            if end <= arena.total <= room and self._reach(tenant):
                pass
            elif end <= arena.cut <= room:
                arena.shrink()
            else:
                self._make_room(tenant, size, room - self._slack)
                tenant.schedule = schedule
                self._ranges(tenant)
                is_seated = False
        if not is_seated:
            self._seat(tenant, arena)
        arena.show(tenant)

    def _make_room(self, tenant: Tenant, size: int, room: int) -> None:
        """Free the arena for a part that runs once an image; from now on the others leave enough free for it."""
        if size > room:
            raise MemoryShortage(
                f"{tenant.name} does not fit into {gigabytes(self.budget)}: it needs {gigabytes(size)} of weights and "
                f"{gigabytes(tenant.reserve)} for activations, and {gigabytes(max(0, room + tenant.reserve))} are not taken "
                "by other tensors; give a larger budget, a smaller image, or enable tiling or slicing of the VAE"
            )
        if any(other.loops for other in self.arena.seated):
            self._most_fixed = max(size, min(room, self._most_fixed or room))
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

    def _demand(self, tenant: Tenant) -> Demand:
        return Demand(tenant.name, self._blocks(tenant), tenant.rest, tenant.reserve, tenant.other_ms)

    def _blocks(self, tenant: Tenant) -> tuple[Block, ...]:
        return tenant.blocks_of(self.machine)

    @property
    def _workspace(self) -> int:
        return min(WORKSPACE, self.budget // 16)

    @property
    def _slack(self) -> int:
        """Small tensors of the caller come and go: a plan stays as long as this much more is taken."""
        return self._workspace // 2


def _slots_of(schedule: Schedule) -> int:
    """Return the bytes of all slots."""
    return min(schedule.slots, len(schedule.streamed)) * schedule.slot_size


_POOLS: dict[tuple[torch.device, Memory], Pool] = {}


def pool_of(where: torch.device, config: Memory) -> Pool:
    """Return the pool of a budget; equal budgets of a process are one."""
    return _POOLS.setdefault((where, config), Pool(where, config))
