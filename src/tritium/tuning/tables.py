"""Tables of verdicts: one JSON file per device, from the package and from the user's cache folder.

A file is always replaced as a whole, and a damaged one is ignored. A row of the user is valid for the
versions it was measured with; rows of other versions stay in the file unused. Shipped rows are valid for all versions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from tritium import compat, device, disk, envs
from tritium.tuning.verdict import Key, Verdict

SHIPPED = Path(__file__).parent

# A GPU has another's rates if it has its compute capability and as many multiprocessors, give or take this share.
SAME_MULTIPROCESSORS = 0.1

# Inductor's limits: the longest row that it always holds in registers, and the longest row that it never cuts.
INDUCTOR_PERSISTENT = 1024
INDUCTOR_WHOLE = 8192


@dataclass(frozen=True)
class Limit:
    """Rows of up to `elements` elements are persistent in kernels with at most `reads` loads per position."""

    reads: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class ReductionLimits:
    """Which rows a reduction holds in registers on one device, and which are cut into parts.

    An omitted field leaves the choice to Inductor.

    >>> limits = ReductionLimits(persistent_up_to=(Limit(3, 8192),))
    >>> limits.limit(2), limits.limit(4)
    (8192, None)
    """

    # Replaces Inductor's 1,024.
    persistent_up_to: tuple[Limit, ...] = ()
    # Rows of up to this many elements are not cut, even if there are few.
    whole_up_to: int = INDUCTOR_WHOLE
    # Versions of the packages that generated the measured code.
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)

    def limit(self, reads: int) -> int | None:
        """Return the longest persistent row of a kernel with `reads` loads; None if it was not measured."""
        fitting = [limit for limit in self.persistent_up_to if limit.reads >= reads]
        return min(fitting, key=lambda limit: limit.reads).elements if fitting else None

    def holds(self, elements: int, reads: int) -> bool:
        """Return True if a kernel with `reads` loads holds rows of so many elements in registers.

        >>> ReductionLimits().holds(1024, 9), ReductionLimits().holds(1025, 1)
        (True, False)
        """
        return elements <= INDUCTOR_PERSISTENT or elements <= (self.limit(reads) or 0)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        return cls(**{**entry, "persistent_up_to": tuple(Limit(**one) for one in entry.get("persistent_up_to", ()))})

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a file, without fields at their defaults."""
        defaults = asdict(INDUCTOR_LIMITS)
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


INDUCTOR_LIMITS = ReductionLimits()


@dataclass(frozen=True)
class Machine:
    """The device that a table is about, or that runs a graph."""

    name: str = ""
    capability: str | None = None
    multiprocessors: int | None = None

    @classmethod
    def of(cls, where: str | torch.device) -> Machine:
        """Return the machine of a device, or of the current device of a type."""
        return _machine(torch.device(where))

    def is_like(self, other: Machine) -> bool:
        """Return True if kernels reach the same shares of bandwidth and arithmetic on both."""
        if not self.multiprocessors or not other.multiprocessors or self.capability != other.capability:
            return False
        return abs(self.multiprocessors / other.multiprocessors - 1) <= SAME_MULTIPROCESSORS

    @property
    def file_name(self) -> str:
        """The name of the device's files.

        >>> Machine("NVIDIA H200").file_name
        'nvidia-h200.json'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") + ".json"


@functools.cache
def _machine(where: torch.device) -> Machine:
    about = device.describe(where.type, where.index)
    return Machine(about.name, about.capability, device.multiprocessors(where.type, where.index))


@dataclass(frozen=True)
class Table:
    """The content of a file; `damage` is None unless it could not be read."""

    rows: Mapping[Key, Verdict] = field(default_factory=dict)
    machine: Machine = Machine()
    reductions: ReductionLimits | None = None
    damage: str | None = None


def user_folder() -> Path:
    """Return the folder of this machine's own tables."""
    return envs.cache_home() / "tritium" / "tuning"


def current_versions() -> dict[str, str]:
    """Return the versions on which the times of compiled blocks depend: another torch generates other code."""
    return {"torch": compat.versions.version_text()}


def load(path: Path) -> Table:
    """Read a table; a file that does not exist has no rows. An unchanged file is not parsed again."""
    try:
        stat = path.stat()
        return _load(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except FileNotFoundError:
        return Table()
    except OSError as error:
        return Table(damage=f"it cannot be read ({error.strerror or error})")


@functools.lru_cache(maxsize=16)
def _load(path: Path, version: tuple[int, ...]) -> Table:
    del version
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = [Verdict.from_dict(row) for row in content["rows"]]
        limits = content.get("reductions")
        machine = Machine(content.get("device", ""), content.get("capability"), content.get("multiprocessors"))
        reductions = None if limits is None else ReductionLimits.from_dict(limits)
    # A UnicodeDecodeError is a ValueError; deep nesting exhausts the parser's stack.
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        return Table(damage=f"{type(error).__name__}: {error}")
    return Table({row.key: row for row in rows}, machine, reductions)


def store(
    path: Path, machine: Machine, verdicts: Iterable[Verdict] = (), reductions: ReductionLimits | None = None
) -> None:
    """Add rows to a table, or replace its limits; the last row of a key wins."""
    table = load(path)
    merged = {**table.rows, **{verdict.key: verdict for verdict in verdicts}}
    limits = reductions or table.reductions
    device = {"device": machine.name, "capability": machine.capability, "multiprocessors": machine.multiprocessors}
    about = {**device, "reductions": limits and limits.to_dict()}
    lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in about.items() if value]
    keys = sorted(merged, key=lambda key: (key.op, key.dtype, key.shape))
    text = ",\n".join(json.dumps(merged[key].to_dict()) for key in keys)
    disk.write(path, "{\n" + "".join(lines) + f'"rows": [\n{text}\n]\n}}\n', make_folder=True)


def shipped(machine: Machine) -> Table:
    """Return the package's table of a device."""
    return load(SHIPPED / machine.file_name)


def own(machine: Machine) -> Table:
    """Return the user's table of a device, with a warning if it is damaged."""
    path = user_folder() / machine.file_name
    table = load(path)
    if table.damage is not None:
        _warn(path, table.damage)
    return table


@functools.lru_cache(maxsize=16)
def _warn(path: Path, damage: str) -> None:
    warnings.warn(
        f"tritium: the table {path} is damaged and ignored: {damage}; `tritium tune` writes it again",
        RuntimeWarning,
        stacklevel=2,
    )


def reduction_limits(machine: Machine) -> ReductionLimits:
    """Return the limits of a device: this machine's own before shipped ones, else those of Inductor."""
    own_limits = own(machine).reductions
    if own_limits is not None and own_limits.versions == current_versions():
        return own_limits
    return shipped(machine).reductions or INDUCTOR_LIMITS


def all_reduction_limits() -> dict[str, ReductionLimits]:
    """Return the limits of every device that has a table, without a query for the device of this process."""
    paths = [path for folder in (SHIPPED, user_folder()) for path in sorted(folder.glob("*.json"))]
    return {name: reduction_limits(Machine(name)) for name in sorted({path.stem for path in paths})}


def own_rows(machine: Machine) -> dict[Key, Verdict]:
    """Return the user's rows about compiled blocks that the installed versions generate."""
    rows = own(machine).rows.items()
    return {key: row for key, row in rows if row.in_block and row.versions == current_versions()}


def shipped_rows(machine: Machine) -> dict[Key, Verdict]:
    """Return the package's rows about compiled blocks."""
    return {key: row for key, row in shipped(machine).rows.items() if row.in_block}


def known(machine: Machine) -> list[Verdict]:
    """Return every row about compiled blocks that is valid on a device, this machine's own before shipped ones."""
    return list((shipped_rows(machine) | own_rows(machine)).values())


def like(machine: Machine) -> Machine | None:
    """Return the first device with a shipped table and the rates of this one, or None."""
    others = (load(path).machine for path in sorted(SHIPPED.glob("*.json")))
    return next((other for other in others if machine.is_like(other)), None)


def digest(op: str) -> str:
    """Return a digest of the user's rows of an op, on all devices: part of the cache key of a graph that contains a choice."""
    rows: list[str] = []
    # An unreadable folder is empty; its name may be too long, for example.
    with contextlib.suppress(OSError):
        for path in sorted(user_folder().glob("*.json")):
            own_rows = [row.to_dict() for key, row in load(path).rows.items() if key.op == op]
            rows += [f"{path.name} {json.dumps(row, sort_keys=True)}" for row in own_rows]
    return disk.digest(*rows)[:16]


def forget() -> None:
    """Read the files again, and warn again about damaged ones."""
    _load.cache_clear()
    _warn.cache_clear()
