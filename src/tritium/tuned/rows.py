"""One measurement: the key it belongs to and what each provider took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Characters of a key's part. A size with more than 4,300 digits would not even become an integer.
LONGEST = 500


@dataclass(frozen=True)
class Key:
    """What a measurement is about: an op, the class of its shape, and the dtype."""

    op: str
    shape: str
    dtype: str

    @classmethod
    def of(cls, op: str, shape: Mapping[str, int | str], dtype: Any) -> Key:
        """Return the key of an op for one class of shapes.

        >>> Key.of("rms_norm", {"tokens": 4096, "norm": "rms"}, "torch.bfloat16")
        Key(op='rms_norm', shape='tokens=4096 norm=rms', dtype='bfloat16')
        """
        text = " ".join(f"{name}={size}" for name, size in shape.items())
        return cls(op, text, str(dtype).removeprefix("torch."))

    def sizes(self) -> dict[str, int | str]:
        """Return the shape as a mapping.

        >>> Key("rms_norm", "tokens=4096 norm=rms", "bfloat16").sizes()
        {'tokens': 4096, 'norm': 'rms'}
        """
        pairs = (pair.partition("=") for pair in self.shape.split())
        return {name: int(size) if size.isdecimal() else size for name, _, size in pairs}


@dataclass(frozen=True)
class Verdict:
    """One row of a table: what each provider took, in the compiled block and alone, and the winner."""

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
    def from_dict(cls, row: Any) -> Verdict:
        """Return a row of a file; raise TypeError or ValueError if a field is missing or has the wrong type.

        Fields that this version does not have are left out.
        """
        if not isinstance(row, dict):
            raise TypeError(f"{row!r} is not an object")
        known = {entry.name for entry in fields(cls)} - {"key"}
        verdict = cls(
            Key(*(_text(row, name) for name in ("op", "shape", "dtype"))),
            **{name: value for name, value in row.items() if name in known},
        )
        _text(row, "provider")
        _times(verdict.block_ms, "block_ms")
        if "inductor" not in verdict.block_ms:
            raise ValueError("block_ms has no time for 'inductor'")
        _times(verdict.alone_us, "alone_us")
        _times(verdict.host_us, "host_us")
        if not isinstance(verdict.bytes, int) or not isinstance(verdict.torch, str):
            raise TypeError("bytes is not an integer or torch is not a string")
        if not isinstance(verdict.remarks, dict) or not all(isinstance(text, str) for text in verdict.remarks.values()):
            raise TypeError("remarks is not an object of strings")
        return verdict


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or len(value) > LONGEST:
        raise TypeError(f"{name} is not a string of at most {LONGEST} characters")
    return value


def _times(times: Any, name: str) -> None:
    if not isinstance(times, dict):
        raise TypeError(f"{name} is {times!r}, not an object")
    for provider, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} of {provider!r} is {value!r}, not a time")
    # A key that could not be measured has Inductor's entry alone, and no time.
    if len(times) > 1 and not all(times.values()):
        raise ValueError(f"{name} has a time of zero")
