"""What was measured: which provider of an op is fastest on which device, for which shapes.

A table is a JSON file a device. The package ships the tables of devices it was tuned on; `tritium tune` writes those of
other devices into the user's cache folder, whose rows come first.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from tritium import compat, envs
from tritium.tuned import files
from tritium.tuned.files import read, replace_file
from tritium.tuned.rows import Key, Verdict

__all__ = [
    "Key",
    "Verdict",
    "file_name",
    "files",
    "forget",
    "known",
    "lookup",
    "read",
    "replace_file",
    "user_folder",
    "winner",
    "write",
]

# What an owned provider must save inside a compiled block: this share of the time that Inductor's code for the op takes,
# or Inductor keeps it.
MARGIN = 0.03

# And this share of the block itself: less is noise.
NOISE = 0.01

SHIPPED = Path(__file__).parent


def winner(block_ms: Mapping[str, float], alone_us: Mapping[str, float]) -> str:
    """Who won: the provider with the fastest block, unless what it saves there is a tie.

    The block decides. How long Inductor's code for the op takes alone only says what there is to save: a norm beside an
    attention of a hundred times its length is still worth saving half of.

    >>> winner({"inductor": 1.0, "triton": 0.9, "aten": 0.95}, {"inductor": 500.0})
    'triton'
    >>> winner({"inductor": 1.0, "triton": 0.98}, {"inductor": 900.0}), winner({"inductor": 1.0, "triton": 0.98}, {"inductor": 100.0})
    ('inductor', 'triton')
    """
    best = min(block_ms, key=lambda name: block_ms[name])
    saved = block_ms["inductor"] - block_ms[best]
    own_ms = min(alone_us.get("inductor", 0.0) / 1e3 or block_ms["inductor"], block_ms["inductor"])
    return best if saved >= max(MARGIN * own_ms, NOISE * block_ms["inductor"]) and saved > 0 else "inductor"


def file_name(device: str) -> str:
    """The file of a device.

    >>> file_name("NVIDIA H200")
    'nvidia-h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """The folder of this machine's own tables."""
    return envs.cache_home() / "tritium" / "tuned"


def write(path: Path, device: str, verdicts: Iterable[Verdict]) -> None:
    """Add rows to a table and read all tables again."""
    files.store(path, device, verdicts)
    forget()


def forget() -> None:
    """Read the tables again: a file has changed."""
    _tables.cache_clear()


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
        # Another torch generates other code: what was measured against it is no longer known.
        if verdict.torch == compat.version_text()
    }
    return own, read(SHIPPED / name)


def known(device: str) -> list[Verdict]:
    """Every verdict that holds on a device, this machine's own before shipped ones."""
    own, shipped = _tables(device)
    return list((shipped | own).values())


def lookup(device: str, key: Key) -> tuple[Verdict, str] | None:
    """The verdict about a key on a device, and where it comes from."""
    own, shipped = _tables(device)
    if key in own:
        return own[key], "on this machine"
    found = shipped.get(key) or _nearest(shipped, key)
    return (found, "shipped") if found is not None else None


def _nearest(table: Mapping[Key, Verdict], key: Key) -> Verdict | None:
    """The row that differs in the number of tokens or pixels alone, and not by too much."""
    wanted = key.sizes()
    candidates: list[tuple[float, Verdict]] = []
    for known, verdict in table.items():
        sizes = known.sizes()
        if (known.op, known.dtype) != (key.op, key.dtype) or sizes.keys() != wanted.keys():
            continue
        different = {name for name, size in sizes.items() if size != wanted[name]}
        if len(different) == 1 and different <= set(STRETCHABLE):
            name = different.pop()
            factor = max(int(sizes[name]), int(wanted[name])) / max(1, min(int(sizes[name]), int(wanted[name])))
            candidates.append((factor, verdict))
    factor, nearest = min(candidates, key=lambda pair: pair[0], default=(math.inf, None))
    return nearest if factor <= STRETCH else None


# The sizes along which a kernel only does more of the same, and by which factor a verdict may be stretched.
STRETCHABLE = ("tokens", "pixels")
STRETCH = 16
