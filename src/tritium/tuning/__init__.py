"""Measured times of providers by device, and the provider of a site that follows from them.

A table is a JSON file a device. The package ships the tables of devices it was tuned on; `tritium tune` writes those of
other devices into the user's cache folder, whose rows come first.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tritium import compat, envs
from tritium.tuning import files
from tritium.tuning.costs import INDUCTOR, Cost, Site
from tritium.tuning.files import Table, read, replace_file
from tritium.tuning.prediction import Prediction, predict
from tritium.tuning.rows import Key, Verdict

__all__ = [
    "Cost",
    "Decision",
    "Key",
    "Machine",
    "Prediction",
    "Site",
    "Verdict",
    "decide",
    "file_name",
    "files",
    "forget",
    "known",
    "like",
    "predict",
    "read",
    "replace_file",
    "user_folder",
    "winner",
    "write",
]

SHIPPED = Path(__file__).parent

# Files in SHIPPED with other contents.
_OTHERS = ("attention-", "reductions")

# A GPU has another's rates if it has its compute capability and as many multiprocessors, give or take this share.
SAME_MULTIPROCESSORS = 0.1


@dataclass(frozen=True)
class Machine:
    """The device a decision is about."""

    name: str
    capability: str | None = None
    multiprocessors: int | None = None

    def is_like(self, table: Table) -> bool:
        """Whether kernels reach the same shares of bandwidth and arithmetic here as on a table's device."""
        if not self.multiprocessors or not table.multiprocessors or self.capability != table.capability:
            return False
        return abs(self.multiprocessors / table.multiprocessors - 1) <= SAME_MULTIPROCESSORS


@dataclass(frozen=True)
class Decision:
    """A provider for one site, and the reason."""

    provider: str
    why: str


# Whether Inductor holds rows of so many elements, with so many values loaded for each place, in registers.
Holds = Callable[[int, int], bool]


def decide(
    machine: Machine, key: Key, able: Iterable[str], holds: Holds, *, replayed: bool = False, predicts: bool = True
) -> Decision:
    """Choose the provider of a site among Inductor and those that can take it.

    Args:
        machine: The device that runs the graph.
        key: The op, the class of the shape, and the dtype.
        able: The owned providers that can take the arguments.
        holds: Whether Inductor holds a row in registers in this graph; rows measured against the other form are left out.
        replayed: Whether the graph is recorded and replayed, so that the host's time does not count.
        predicts: Whether costs may be predicted from other shapes. Otherwise a row must be of this very key.
    """
    own, shipped = _tables(machine.name)
    if key in own:
        return _measured(own[key], able, "on this machine", replayed=replayed)
    if key in shipped and _of_one_form([shipped[key]], shipped, key, holds):
        return _measured(shipped[key], able, "shipped", replayed=replayed)
    if not predicts:
        return _left(f"nothing was measured for {key.op}, {key.shape} on this device")
    rows, elsewhere = shipped | own, ""
    if not rows:
        rows, name = _rows_of_like(machine)
        elsewhere = f", measured on {name}"
    prediction = predict(key, _of_one_form(rows.values(), rows, key, holds))
    if prediction is None:
        return _left(_nothing_near(machine, key, rows))
    return _predicted(prediction, able, elsewhere, replayed=replayed)


def _left(reason: str) -> Decision:
    return Decision(INDUCTOR, f"left to Inductor: {reason}")


def _measured(row: Verdict, able: Iterable[str], where: str, *, replayed: bool) -> Decision:
    site = row.site()
    provider = site.among(able).choose(replayed=replayed)
    why = f"{row.why(replayed=replayed)}, {where}"
    best = site.choose(replayed=replayed)
    if best != provider:
        why = f"provider {best!r} is fastest for such shapes and cannot take this one; {why}"
    return _left(why) if provider == INDUCTOR else Decision(provider, why)


def _predicted(prediction: Prediction, able: Iterable[str], elsewhere: str, *, replayed: bool) -> Decision:
    site = prediction.site.among(able)
    provider = site.choose(replayed=replayed)
    if provider != INDUCTOR:
        return Decision(provider, prediction.why(provider, replayed=replayed) + elsewhere)
    owned = [name for name in site.costs if name != INDUCTOR]
    if not owned:
        return _left("no provider that was measured at such shapes can take this one")
    best = max(owned, key=lambda name: site.ratio(name, replayed=replayed))
    return _left(prediction.why(best, replayed=replayed) + elsewhere)


def _of_one_form(rows: Iterable[Verdict], table: Mapping[Key, Verdict], key: Key, holds: Holds) -> list[Verdict]:
    """Return the rows whose code from Inductor has the form that it has at a key: rows walked over, or held in registers."""
    marks = (row.looped for row in table.values() if row.key.op == key.op and row.looped)
    mark = next(marks, None)
    if mark is None:
        return list(rows)
    elements = key.sizes().get(mark["size"])
    is_looped = isinstance(elements, int) and not holds(elements, mark["reads"])
    return [row for row in rows if bool(row.looped) == is_looped]


def _nothing_near(machine: Machine, key: Key, rows: Mapping[Key, Verdict]) -> str:
    shapes = [row for row in rows.values() if row.key.op == key.op]
    if not shapes:
        what = f"nothing was measured for {key.op} on {machine.name}"
    elif predict(key, shapes) is not None:
        what = f"{key.op} was measured against another form of Inductor's reduction than it generates for {key.shape}"
    else:
        what = f"no measured shape of {key.op} is near {key.shape}"
    return f"{what}; `tritium tune` measures"


def winner(row: Verdict, *, replayed: bool = False) -> str:
    """Return the provider that a row's own numbers choose."""
    return row.site().choose(replayed=replayed)


def file_name(device: str) -> str:
    """Return the name of a device's file.

    >>> file_name("NVIDIA H200")
    'nvidia-h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Return the folder of this machine's own tables."""
    return envs.cache_home() / "tritium" / "tuned"


def write(path: Path, machine: Machine, verdicts: Iterable[Verdict]) -> None:
    """Add rows to a table and read all tables again."""
    files.store(path, machine.name, machine.capability, machine.multiprocessors, verdicts)
    forget()


def forget() -> None:
    """Read the tables again: a file has changed."""
    _tables.cache_clear()
    _shipped.cache_clear()


@functools.cache
def _tables(device: str) -> tuple[dict[Key, Verdict], dict[Key, Verdict]]:
    name = file_name(device)
    path = user_folder() / name
    table = files.load(path)
    if table.problem is not None:
        warnings.warn(
            f"tritium: the table {path} is damaged and what is damaged is ignored: {table.problem}; "
            "`tritium tune` writes it again",
            RuntimeWarning,
            stacklevel=2,
        )
    own = {
        key: verdict
        for key, verdict in table.rows.items()
        # Another torch generates other code, which nothing is known about.
        if verdict.torch == compat.versions.version_text()
    }
    return own, read(SHIPPED / name)


@functools.cache
def _shipped() -> tuple[Table, ...]:
    paths = sorted(path for path in SHIPPED.glob("*.json") if not path.name.startswith(_OTHERS))
    return tuple(files.load(path) for path in paths)


def _rows_of_like(machine: Machine) -> tuple[dict[Key, Verdict], str]:
    """Return the shipped rows of a device with this one's rates, and its name."""
    return next(((table.rows, table.device) for table in _shipped() if machine.is_like(table)), ({}, ""))


def like(machine: Machine) -> str | None:
    """Return the device whose shipped table predicts the sites of a machine without rows, or None."""
    return _rows_of_like(machine)[1] or None


def known(device: str) -> list[Verdict]:
    """Return every row that holds on a device, this machine's own before shipped ones."""
    own, shipped = _tables(device)
    return list((shipped | own).values())
