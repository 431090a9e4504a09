"""What was measured: which provider of an op is fastest on which device, for which shapes.

A table is a JSON file a device. This package ships tables of devices it was tuned on; what other devices need is measured
there, once, and kept in the user's cache folder, whose rows come first.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tritium import compat, envs

# What an owned provider must save inside a compiled block: this share of the time that Inductor's code for the op takes,
# or Inductor keeps it.
MARGIN = 0.03

# And this share of the block itself: less is noise.
NOISE = 0.01

SHIPPED = Path(__file__).parent


@dataclass(frozen=True)
class Key:
    """What a measurement is about: an op, the class of its shape, and the dtype."""

    op: str
    shape: str
    dtype: str

    @classmethod
    def of(cls, op: str, shape: Mapping[str, int | str], dtype: Any) -> Key:
        """A key whose shape reads well.

        >>> Key.of("rms_norm", {"tokens": 4096, "norm": "rms"}, "torch.bfloat16")
        Key(op='rms_norm', shape='tokens=4096 norm=rms', dtype='bfloat16')
        """
        text = " ".join(f"{name}={size}" for name, size in shape.items())
        return cls(op, text, str(dtype).removeprefix("torch."))

    def sizes(self) -> dict[str, int | str]:
        """The shape as it was given.

        >>> Key("rms_norm", "tokens=4096 norm=rms", "bfloat16").sizes()
        {'tokens': 4096, 'norm': 'rms'}
        """
        pairs = (pair.partition("=") for pair in self.shape.split())
        return {name: int(size) if size.isdecimal() else size for name, _, size in pairs}


@dataclass(frozen=True)
class Verdict:
    """One row of a table: what each provider took, in the compiled block and alone, and who won."""

    key: Key
    provider: str
    # Milliseconds of the compiled block with each provider; the provider is chosen by these.
    block_ms: Mapping[str, float]
    # Microseconds of the op alone, for information: an op alone cuts no fusion in two.
    alone_us: Mapping[str, float] = field(default_factory=dict)
    # Microseconds that the host is busy with a call of the block.
    host_us: Mapping[str, float] = field(default_factory=dict)
    # The fewest bytes the op must move: inputs once, outputs once.
    bytes: int = 0
    torch: str = ""
    # Why a provider was not measured or not taken.
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How much faster the block is with the best owned provider than with Inductor's code."""
        owned = [ms for name, ms in self.block_ms.items() if name != "inductor"]
        return self.block_ms["inductor"] / min(owned) if owned else 0.0

    def why(self) -> str:
        """The reason that reports give."""
        inductor = self.block_ms["inductor"]
        owned = {name: ms for name, ms in self.block_ms.items() if name != "inductor"}
        if not owned:
            return "; ".join(f"{name}: {remark}" for name, remark in self.remarks.items()) or "nothing else can take it"
        best = min(owned, key=lambda name: owned[name])
        return f"measured {self.ratio:.2f}x against Inductor in a block ({best} {owned[best]:.3f}, inductor {inductor:.3f} ms)"

    def to_dict(self) -> dict[str, Any]:
        row = {**asdict(self.key), **{name: value for name, value in asdict(self).items() if name != "key"}}
        return {name: value for name, value in row.items() if value not in ({}, "", 0)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Verdict:
        key = Key(row["op"], row["shape"], row["dtype"])
        return cls(key, **{name: value for name, value in row.items() if name not in ("op", "shape", "dtype")})


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
    """Where measurements of this machine are kept."""
    return envs.cache_home() / "tritium" / "tuned"


def read(path: Path) -> dict[Key, Verdict]:
    """The rows of a table; none where there is no such file or it cannot be read."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {verdict.key: verdict for verdict in map(Verdict.from_dict, rows)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(path: Path, device: str, verdicts: Iterable[Verdict]) -> None:
    """Add rows to a table. Another process may be doing the same: the file is always whole, the last row of a key wins."""
    merged = read(path) | {verdict.key: verdict for verdict in verdicts}
    rows = [merged[key].to_dict() for key in sorted(merged, key=lambda key: (key.op, key.dtype, key.shape))]
    text = "{\n" + f'"device": {json.dumps(device)},\n"rows": [\n'
    text += ",\n".join(json.dumps(row) for row in rows) + "\n]\n}\n"
    replace_file(path, text)
    forget()


def replace_file(path: Path, text: str) -> None:
    """Write a file whose readers see all of it or the one before, whoever else is writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def forget() -> None:
    """Read the tables anew: a file has changed."""
    _tables.cache_clear()


@functools.cache
def _tables(device: str) -> tuple[dict[Key, Verdict], dict[Key, Verdict]]:
    name = file_name(device)
    own = {
        key: verdict
        for key, verdict in read(user_folder() / name).items()
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
