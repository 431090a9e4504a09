"""What a user sets: the bytes that a pipeline may take on its device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tritium.errors import ConfigError
from tritium.techniques.memory.schedule import SLOTS

FIT = "fit"

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Memory:
    """Keep weights and activations within a budget: blocks that do not fit are copied from the host while others compute.

    `budget` is a text such as "16GB" or "14.5GiB", a number of bytes, or "fit" for what is free on the device. It covers
    what PyTorch allocates; the CUDA context takes about half a gigabyte more. Pipelines of one process with an equal
    `Memory` share it. `slots` is the number of buffers through which blocks are copied, 2 to 4; the planner chooses it if
    left out.
    """

    budget: str | int = FIT
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.budget != FIT:
            bytes_of(self.budget)
        if self.slots is not None and (isinstance(self.slots, bool) or self.slots not in SLOTS):
            raise ConfigError(f"slots cannot be {self.slots!r}; take 2, 3 or 4, or leave it out")

    def __str__(self) -> str:
        return f"memory {self.budget}"


def bytes_of(budget: str | int) -> int:
    """Return the bytes that a text or a number stands for; raise a `ConfigError` for anything else.

    >>> bytes_of("16GB"), bytes_of("1.5 GiB"), bytes_of(4096)
    (16000000000, 1610612736, 4096)
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", budget) if isinstance(budget, str) else None
    unit = _UNITS.get(found[2].upper()) if found is not None else None
    if found is None or unit is None or not float(found[1]):
        raise ConfigError(f"a budget cannot be {budget!r}; write '16GB', '14.5GiB', a number of bytes, or 'fit'")
    return int(float(found[1]) * unit)


def gigabytes(size: float) -> str:
    """Return bytes as a text.

    >>> gigabytes(16_040_000_000), gigabytes(226_000_000), gigabytes(48)
    ('16.0 GB', '226 MB', '48 B')
    """
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB" if size >= 1e3 else f"{size:.0f} B"
