"""Run a part whose blocks are loaded while others compute.

The order of the blocks is that of the calls. Before a block computes, the computation waits for its weights; after it, the
next blocks are loaded, up to the first one whose slot is still needed. A block that is called in another order is loaded
when it is called, and counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import PipelineError
from tritium.techniques.memory.arena import Arena, Seat
from tritium.techniques.memory.units import Unit, divided, writing

# A call whose blocks are timed: earlier ones compile and capture.
TIMED_CALL = 4


class Streamed:
    """The weights of one part, and where they are."""

    def __init__(self, name: str, module: nn.Module, blocks: Sequence[nn.Module], *, keeps_origin: bool) -> None:
        self.name, self.module = name, module
        self.blocks = list(blocks)
        self._keeps_origin = keeps_origin
        self.arena: Arena
        # The seat of the weights outside of the blocks, then those of the blocks, in the order of the calls.
        self.seats: list[Seat] = []
        self._seat_of: dict[nn.Module, int] = {}
        self._next: list[tuple[list[Seat], list[Seat]]] = []
        self._streamed_next: list[tuple[list[Seat], list[Seat]]] = []
        self.calls = 0
        # Blocks that had to be loaded when they were called, by name, and how often.
        self.missed: dict[str, int] = {}
        # Place, start and end of each block of the timed call.
        self._spans: list[tuple[int, Any, Any]] = []
        self._is_timed = False
        self._is_settled = False
        self._structure: list[int] = []
        self._watched: tuple[list[torch.Tensor], list[int | None], list[int]] = ([], [], [])
        self._versions: list[int] = []
        self._opened = 0
        # True if other code has written to weights, whose values are lost then.
        self._is_spoiled = False

    # --- weights ---

    def pack(self, allocate: Callable[[int], torch.Tensor]) -> None:
        """Copy the weights to the host; weights that are there already keep the values that they have there."""
        known = {id(place.tensor): seat.unit for seat in self.seats for place in seat.unit.places}
        origins = {key: value for seat in self.seats for key, value in seat.unit.origin.items()}
        before = {tuple(map(id, seat.unit.tensors)): seat for seat in self.seats}
        for seat in self.seats:
            seat.unit.bind(seat.unit.host)
        rest, inside = divided(self.module, self.blocks)
        seats = []
        for number, tensors in enumerate([rest, *inside]):
            same = before.get(tuple(map(id, tensors)))
            name = self.name if not number else self._path(self.blocks[number - 1])
            if same is None:
                unit = Unit.packed(name, tensors, allocate, keeps_origin=self._keeps_origin)
                unit.changed = any(id(tensor) in known for tensor in tensors)
                unit.origin |= {id(tensor): origins[id(tensor)] for tensor in tensors if id(tensor) in origins}
            seats.append(same or Seat(unit))
        self.seats = seats
        self._order([])
        self._structure = self._read_structure()

    def _path(self, block: nn.Module) -> str:
        path = next((path for path, module in self.module.named_modules() if module is block), "")
        return f"{self.name}.{path}"

    @property
    def rest(self) -> Seat:
        return self.seats[0]

    @property
    def size(self) -> int:
        """The bytes of all weights."""
        return sum(seat.unit.size for seat in self.seats)

    def order_by(self, calls: Sequence[int]) -> None:
        """Put the blocks into the order of calls, and those that were not called behind them."""
        order = [*dict.fromkeys(calls), *(n for n in range(len(self.blocks)) if n not in calls)]
        self.blocks = [self.blocks[number] for number in order]
        self._order(order)

    def _order(self, order: Sequence[int]) -> None:
        if order:
            self.seats = [self.rest, *(self.seats[number + 1] for number in order)]
        self._seat_of = {block: place for place, block in enumerate(self.blocks, 1)}

    def seated(self) -> None:
        """Prepare for the ranges that the seats have now."""
        self._is_settled = False
        self._next = [
            (self._following(place, [seat]), self._following(place, [])) for place, seat in enumerate(self.seats)
        ]
        self._streamed_next = [
            ([seat for seat in before if seat.slot is not None], [seat for seat in after if seat.slot is not None])
            for before, after in self._next
        ]
        self.watch()

    def _following(self, place: int, claimed: Sequence[Seat]) -> list[Seat]:
        """Return the next seats in order, up to the first whose range is claimed by an earlier one."""
        starts = {seat.start for seat in claimed}
        found = []
        for step in range(1, len(self.seats)):
            seat = self.seats[(place + step) % len(self.seats)]
            if seat.start in starts:
                break
            starts.add(seat.start)
            found.append(seat)
        return found

    # --- changes by others ---

    def watch(self) -> None:
        """Remember the addresses and versions of the weights."""
        tensors = [tensor for seat in self.seats for tensor in seat.unit.tensors]
        self._watched = (tensors, [tensor.data_ptr() for tensor in tensors], list(range(len(tensors))))
        self._versions = self._read_versions()

    def note(self) -> None:
        """Remember if other code has written to the weights since the last `watch`."""
        self._is_spoiled = self._is_spoiled or self._is_touched()

    def _is_touched(self) -> bool:
        return not compat.capture.lie_at(*self._watched) or self._versions != self._read_versions()

    def _read_versions(self) -> list[int]:
        return [compat.tensors.version_of(tensor) for tensor in self._watched[0] if not tensor.is_inference()]

    def _read_structure(self) -> list[int]:
        found = []
        for module in self.module.modules():
            parameters, buffers = compat.modules.tensors_of(module)
            found += [*map(id, parameters.values()), *map(id, buffers.values())]
        return found

    @property
    def is_rebuilt(self) -> bool:
        """True if modules or weights were added or replaced, as adapters are."""
        return self._read_structure() != self._structure

    def check(self, *, addresses: bool = True) -> None:
        """Raise a `PipelineError` if the weights were moved or written to by other code, or if gradients are needed.

        Without `addresses`, only writes that were noticed earlier count.
        """
        tensors = self._watched[0]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise PipelineError(
                f"{self.name} needs gradients, and its weights are overwritten while it runs (memory); call it under "
                "torch.no_grad() or torch.inference_mode()"
            )
        if self._is_spoiled or (addresses and self._is_touched()):
            raise PipelineError(
                f"weights of {self.name} were moved or written to while they take turns on the device (memory), so what "
                "was there is lost; change them with load_state_dict or an adapter, or before optimize"
            )

    @contextlib.contextmanager
    def on_host(self, *, writes: bool = False) -> Iterator[None]:
        """Let all weights be their values on the host, to read or to write them."""
        self._opened += 1
        try:
            if self._opened == 1:
                for seat in self.seats:
                    seat.unit.bind(seat.unit.host)
            yield
        finally:
            self._opened -= 1
            for seat in self.seats:
                seat.unit.changed |= writes
                seat.present &= not writes
            if not self._opened:
                self._bind_again(self.seats)

    @contextlib.contextmanager
    def opened(self, tensor: Any) -> Iterator[None]:
        """Let the unit of a weight have its values on the device, and keep what is written to them."""
        seat = next((seat for seat in self.seats if any(one is tensor for one in seat.unit.tensors)), None)
        if seat is None or self._opened:
            yield
            return
        with writing():
            values = self.arena.link.allocate(seat.unit.size)
            values.copy_(seat.unit.host)
        seat.unit.bind(values)
        try:
            yield
        finally:
            with writing():
                seat.unit.host.copy_(values)
            # Weights that were stored anew in between, as quantized ones are.
            seat.unit.take_moved(values)
            seat.unit.changed, seat.present = True, False
            self._bind_again([seat])

    def _bind_again(self, seats: Sequence[Seat]) -> None:
        for seat in seats:
            if seat.buffer is not None:
                seat.unit.bind(seat.buffer)
            else:
                seat.unit.poison(self.arena.link.device)
        self._is_settled = False
        self.watch()

    # --- calls ---

    def begin(self) -> None:
        """Start a call: wait for the weights outside of the blocks, and begin to load the first blocks."""
        self.calls += 1
        self.arena.link.order()
        self._is_settled = all(seat.present for seat in self.seats if seat.slot is None)
        self._is_timed = self.calls == TIMED_CALL
        self._before(0, counts=False)

    def end(self) -> None:
        self._after(0)

    def around_block(self, block: nn.Module) -> Callable[..., Any]:
        """Return the function around the calls of a block."""

        def run(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = self._seat_of[block]
            start = self._before(place)
            try:
                return call(*args, **kwargs)
            finally:
                end = self._after(place)
                if self._is_timed:
                    self._spans.append((place, start, end))

        return compat.dynamo.untraced(run)

    def _before(self, place: int, *, counts: bool = True) -> Any:
        seat, arena = self.seats[place], self.arena
        if seat.buffer is None:
            raise PipelineError(
                f"{seat.unit.name} has no memory outside of a call of {self.name}; call {self.name} first"
            )
        if not seat.present:
            if counts:
                self.missed[seat.unit.name] = self.missed.get(seat.unit.name, 0) + 1
            arena.load(seat)
        if seat.arrived is not None:
            arena.link.wait(seat.arrived)
            seat.arrived = None
        start = arena.link.mark(timed=True) if self._is_timed else None
        self._load(place, 0)
        return start

    def _after(self, place: int) -> Any:
        mark = self.arena.link.mark(timed=self._is_timed)
        self.arena.use(self.seats[place], mark)
        self._load(place, 1)
        return mark

    def _load(self, place: int, which: int) -> None:
        for seat in (self._streamed_next if self._is_settled else self._next)[place][which]:
            if not seat.present:
                self.arena.load(seat)

    def block_ms(self) -> Mapping[int, float] | None:
        """Return the milliseconds of the blocks in the timed call, once the device has done it."""
        spans = self._spans
        if not spans or self._is_timed or not all(end.query() for _, _, end in spans):
            return None
        found: dict[int, float] = {}
        for place, start, end in spans:
            found[place - 1] = found.get(place - 1, 0.0) + float(start.elapsed_time(end))
        return found
