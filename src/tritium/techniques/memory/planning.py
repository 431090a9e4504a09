"""Plan one part of a pipeline: its blocks, the space for them, and what the plan costs, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tritium import device
from tritium.errors import MemoryShortage
from tritium.techniques.memory.config import gigabytes
from tritium.techniques.memory.schedule import SLOTS, Block, Schedule, choose, size_of

MEASURED, TABLED, GIVEN = "measured", "tabled", "given"


@dataclass(frozen=True)
class Machine:
    """The rates that times are computed from, and where they come from."""

    name: str
    # Bytes a second from the host to the device, and floating-point operations a second.
    link: float
    flops: float
    link_is: str = TABLED

    @classmethod
    def of(cls, device_type: str, link: float | None = None) -> Machine:
        """Return the rates of a device: a measured link, else those of a table."""
        found = device.describe(device_type)
        rates = device.RATES.get(found.name, device.RATES[device.DEFAULT_RATES])
        return cls(found.name, link or rates[0], rates[1], MEASURED if link else TABLED)

    @property
    def rate(self) -> float:
        """The bytes that arrive in a millisecond."""
        return self.link / 1e3

    def ms(self, flops: float) -> float:
        return flops / self.flops * 1e3

    def __str__(self) -> str:
        return f"{self.link / 1e9:.0f} GB/s {self.link_is}"


@dataclass(frozen=True)
class Demand:
    """The weights of a part and what its calls need: all that a schedule is chosen from."""

    name: str
    blocks: tuple[Block, ...]
    # Bytes of weights outside of the blocks, and of activations.
    rest: int
    reserve: int
    other_ms: float = 0.0

    @property
    def weights(self) -> int:
        return self.rest + sum(block.size for block in self.blocks)

    def schedule(
        self, budget: int, machine: Machine, slots: int | None = None, *, streams_all: bool = False
    ) -> Schedule:
        """Return the schedule within a budget; with `streams_all`, the one that takes least memory.

        Raises a `MemoryShortage` with the least budget if none fits.
        """
        space = budget - self.rest - self.reserve
        count = slots or min(SLOTS)
        if streams_all and size_of(self.blocks, (), count) <= space:
            return Schedule(self.blocks, frozenset(), count, machine.rate, self.other_ms)
        found = choose(self.blocks, space, machine.rate, self.other_ms, slots)
        if found is None:
            slot = max((block.size for block in self.blocks), default=0)
            least = self.rest + self.reserve + size_of(self.blocks, (), count)
            raise MemoryShortage(
                f"{self.name} does not fit into {gigabytes(budget)}: it needs {gigabytes(least)} at least beside other "
                f"tensors ({gigabytes(self.rest)} outside of its blocks, {count} slots of {gigabytes(slot)}, "
                f"{gigabytes(self.reserve)} for activations and workspaces); give a larger budget, or a smaller image"
            )
        return found


def cost(name: str, schedule: Schedule, budget: int, machine: Machine) -> str:
    """Return what a schedule costs, in one line."""
    if not schedule.streamed:
        return f"{name} is resident: at {gigabytes(budget)} nothing is copied"
    ratio = schedule.step_ms / schedule.compute_ms if schedule.compute_ms else 1.0
    return (
        f"{name} needs {schedule.needed_share:.0%} resident on this link ({machine}); at {gigabytes(budget)} it has "
        f"{share_resident(schedule.blocks, schedule.resident):.0%}: expect {ratio:.2f}x the time of a step with all "
        f"weights resident ({schedule.step_ms:.1f} ms instead of {schedule.compute_ms:.1f})"
    )


def share_resident(blocks: Sequence[Block], resident: frozenset[int]) -> float:
    """Return the share of the bytes of blocks that is resident."""
    total = sum(block.size for block in blocks)
    return sum(blocks[place].size for place in resident) / total if total else 1.0
