"""Memory on the device that units take turns in: each has a range of it, and ranges overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritium.techniques.memory.link import Link
from tritium.techniques.memory.units import Unit


@dataclass(eq=False)
class Seat:
    """A unit with its range of an arena. `present` is True from the start of its copy until another overwrites it."""

    unit: Unit
    # The number of the range among those that copies share, or None if no other unit of the part has it.
    slot: int | None = None
    start: int = 0
    buffer: torch.Tensor | None = None
    present: bool = False
    arrived: Any = None
    # After the last computation that read it, and the number of that computation.
    used: Any = None
    used_at: int = 0
    rivals: list[Seat] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.unit.size

    def leave(self, where: torch.device) -> None:
        """Give up the range: the weights show NaN until the unit has one again."""
        self.buffer, self.present, self.rivals = None, False, []
        self.unit.poison(where)


class Arena:
    """A piece of memory that stays, and another one behind it that can be given up for a while.

    Captured code has addresses in it, so the first piece does not move as long as its size is enough.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._fixed: torch.Tensor | None = None
        self._loose: torch.Tensor | None = None
        # The seats with a range, by owner.
        self.seated: dict[Any, Sequence[Seat]] = {}
        self.cut = self.total = 0
        self._turns = 0

    @property
    def held(self) -> int:
        """The bytes on the device now."""
        return sum(piece.numel() for piece in (self._fixed, self._loose) if piece is not None)

    def resize(self, total: int, cut: int) -> None:
        """Allocate other memory; seats lose their ranges."""
        self.clear()
        # Other sizes do not fit into memory that PyTorch has kept.
        self.link.give_back()
        self.total, self.cut = total, min(cut, total)
        self._fixed = self.link.allocate(self.cut)
        self.reach()

    def reach(self) -> None:
        """Allocate the loose piece again; `show` gives its seats their ranges."""
        if self._loose is None and self.total > self.cut:
            self._loose = self.link.allocate(self.total - self.cut)
            for seats in self.seated.values():
                for seat in seats:
                    self._give(seat)

    def shrink(self) -> None:
        """Free the loose piece."""
        if self._loose is None:
            return
        self.link.finish()
        for seats in self.seated.values():
            for seat in seats:
                if seat.start >= self.cut:
                    seat.buffer, seat.present = None, False
                    seat.unit.poison(self.link.device)
        self._loose = None

    def clear(self) -> None:
        """Free all memory; seats lose their ranges."""
        self.link.finish()
        for seats in self.seated.values():
            for seat in seats:
                seat.leave(self.link.device)
        self.seated.clear()
        self._fixed = self._loose = None
        self.total = self.cut = 0

    def seat(self, owner: Any, seats: Sequence[Seat]) -> None:
        """Give units their ranges; they have to be loaded."""
        self.unseat(owner)
        others = [other for known in self.seated.values() for other in known]
        for place, seat in enumerate(seats):
            seat.rivals = [other for other in [*others, *seats[:place]] if _overlap(seat, other)]
            for other in seat.rivals:
                other.rivals.append(seat)
            seat.present = False
            self._give(seat)
        self.seated[owner] = seats

    def unseat(self, owner: Any) -> None:
        """Take the ranges of units back."""
        gone = self.seated.pop(owner, ())
        for seat in gone:
            for other in seat.rivals:
                other.rivals = [rival for rival in other.rivals if rival is not seat]
            seat.leave(self.link.device)

    def _give(self, seat: Seat) -> None:
        piece, offset = (self._fixed, 0) if seat.end <= self.cut else (self._loose, self.cut)
        seat.buffer = None if piece is None else piece[seat.start - offset : seat.end - offset]

    def show(self, owner: Any) -> None:
        """Let the weights of units view their ranges."""
        for seat in self.seated[owner]:
            assert seat.buffer is not None
            seat.unit.bind(seat.buffer)

    def hide(self, owner: Any) -> None:
        """Let the weights of units show NaN; what is loaded stays."""
        for seat in self.seated[owner]:
            seat.unit.poison(self.link.device)

    # --- copies ---

    def load(self, seat: Seat) -> None:
        """Begin the copy of a unit, after the last computation in its range."""
        assert seat.buffer is not None
        last = seat
        for other in seat.rivals:
            other.present = False
            if other.used_at > last.used_at:
                last = other
        seat.arrived = self.link.load(seat.buffer, seat.unit.host, last.used)
        seat.present = True

    def use(self, seat: Seat, mark: Any) -> None:
        """Note that the computation has read a unit up to an event."""
        self._turns += 1
        seat.used, seat.used_at = mark, self._turns


def _overlap(left: Seat, right: Seat) -> bool:
    return left.start < right.end and right.start < left.end


def place(
    lead: int, slots: Iterable[Seat], count: int, slot_size: int, others: Iterable[Seat], cut: int = 0
) -> list[int]:
    """Give units their ranges: slots at the start, the other units behind `lead`, none across the cut.

    Return the ends: of the slots, then of the other units.
    """
    starts, offset = [], 0
    for _ in range(count):
        starts.append(_before_or_behind(offset, slot_size, cut))
        offset = starts[-1] + slot_size
    for turn, seat in enumerate(slots):
        seat.slot = turn % count
        seat.start = starts[seat.slot]
    offset = max(offset, lead)
    ends = [offset]
    for seat in others:
        seat.slot, seat.start = None, _before_or_behind(offset, seat.unit.size, cut)
        offset = seat.end
        ends.append(offset)
    return ends


def _before_or_behind(start: int, size: int, cut: int) -> int:
    return cut if start < cut < start + size else start
