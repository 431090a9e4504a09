"""One measurement: the key it belongs to, what each provider took, and the costs of the site that follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tritium.tuning.costs import INDUCTOR, LAUNCH_US, MARGIN, NOISE, Cost, Site, launches_us

# Characters of a key's part, and of the digits of a size in it: more would overflow a float.
LONGEST = 500
LONGEST_SIZE = 15

# A time above this, in any unit here, is not a measurement.
LONGEST_TIME = 1e12


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
    """One row of a table: what each provider took in the compiled block and alone, and the winner."""

    key: Key
    # The provider that these numbers choose; on a GPU, for a graph that is not replayed.
    provider: str
    # Milliseconds of the compiled block on the device, by provider.
    block_ms: Mapping[str, float]
    # Microseconds of the op alone on the device.
    alone_us: Mapping[str, float] = field(default_factory=dict)
    # Microseconds in which the host issues a call of the block without waiting for it. Rows without it have launches.
    issue_us: Mapping[str, float] = field(default_factory=dict)
    # Launches of the block by kind, counted in generated code; the host's time is their number times the time of one.
    launches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # The size that Inductor's kernel walked over, and the values it loads for each place; empty where it holds rows in
    # registers or reduces nothing. The row says nothing about a graph in which Inductor's kernel is of the other form.
    looped: Mapping[str, Any] = field(default_factory=dict)
    # The fewest bytes the op must move: inputs once, outputs once.
    bytes: int = 0
    torch: str = ""
    # Why a provider was not measured or not taken.
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def owned(self) -> list[str]:
        return [name for name in self.block_ms if name != INDUCTOR]

    @property
    def ratio(self) -> float:
        """How much faster the block is on the device with the best owned provider than with Inductor's code."""
        return self.block_ms[INDUCTOR] / min(self.block_ms[name] for name in self.owned) if self.owned else 0.0

    def site(self) -> Site:
        """Return what the site alone costs inside the block.

        An owned kernel takes as long in the block as alone, so the block less that time is the time of its neighbours.
        Inductor's block less the neighbours is the time of Inductor's code in context.
        """
        block = {name: ms * 1e3 for name, ms in self.block_ms.items()}
        alone = [block[name] - self.alone_us[name] for name in self.owned if name in self.alone_us]
        # Each block takes longer than its neighbours, whatever the noise of the times alone.
        neighbours = max(0.0, min([*alone, *(0.99 * us for us in block.values())])) if alone else 0.0
        noise = NOISE * block[INDUCTOR]
        host, block_host, source = self._host_us()
        costs = {}
        for name, us in block.items():
            same = abs(us - block[INDUCTOR]) < noise
            costs[name] = Cost((block[INDUCTOR] if same else us) - neighbours, host[name])
        return Site(costs, noise, MARGIN * block_host, source)

    def _host_us(self) -> tuple[dict[str, float], float, str]:
        """Return the host's time of the site by provider, that of the block with Inductor's code, and the source."""
        counts = [self.launches.get(name, {}) for name in self.block_ms]
        shared = launches_us({kind: min(count.get(kind, 0) for count in counts) for kind in LAUNCH_US})
        modelled = {name: launches_us(self.launches.get(name, {})) for name in self.block_ms}
        own = max(modelled[INDUCTOR] - shared, LAUNCH_US["generated"])
        if self.issue_us.keys() >= self.block_ms.keys():
            base = self.issue_us[INDUCTOR]
            return {name: own + self.issue_us[name] - base for name in self.block_ms}, base, "measured"
        if not self.launches.keys() >= self.block_ms.keys():
            return dict.fromkeys(self.block_ms, own), own, ""
        base = modelled[INDUCTOR]
        return {name: own + us - base for name, us in modelled.items()}, base, "from launches"

    def why(self, *, replayed: bool = False) -> str:
        """Return the reason that reports give."""
        if not self.owned:
            return "; ".join(f"{name}: {remark}" for name, remark in self.remarks.items()) or "nothing else can take it"
        best = min(self.owned, key=lambda name: self.block_ms[name])
        text = (
            f"measured {self.ratio:.2f}x against Inductor in a block "
            f"({best} {self.block_ms[best]:.3f}, inductor {self.block_ms[INDUCTOR]:.3f} ms"
        )
        site = self.site()
        if replayed:
            return f"{text}; replayed: the host's time does not count)"
        return f"{text}; {site.host_text(best)})"

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
        if re.search(rf"\d{{{LONGEST_SIZE + 1}}}", verdict.key.shape):
            raise ValueError(f"a size has more than {LONGEST_SIZE} digits")
        _text(row, "provider")
        verdict._check_times()
        _check_launches(verdict.launches)
        _check_looped(verdict)
        if not isinstance(verdict.bytes, int) or not isinstance(verdict.torch, str):
            raise TypeError("bytes is not an integer or torch is not a string")
        if not isinstance(verdict.remarks, dict) or not all(isinstance(text, str) for text in verdict.remarks.values()):
            raise TypeError("remarks is not an object of strings")
        return verdict

    def _check_times(self) -> None:
        for name in ("block_ms", "alone_us", "issue_us"):
            _times(getattr(self, name), name)
        if INDUCTOR not in self.block_ms:
            raise ValueError("block_ms has no time for 'inductor'")


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or len(value) > LONGEST:
        raise TypeError(f"{name} is not a string of at most {LONGEST} characters")
    return value


def _times(times: Any, name: str) -> None:
    if not isinstance(times, dict):
        raise TypeError(f"{name} is {times!r}, not an object")
    for provider, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_TIME:
            raise ValueError(f"{name} of {provider!r} is {value!r}, not a time")
    # A key that could not be measured has Inductor's entry alone, and no time.
    if len(times) > 1 and not all(times.values()):
        raise ValueError(f"{name} has a time of zero")


def _check_looped(verdict: Verdict) -> None:
    looped: Any = verdict.looped
    if not isinstance(looped, dict):
        raise TypeError(f"looped is {looped!r}, not an object")
    size = verdict.key.sizes().get(str(looped.get("size")))
    if looped and not (isinstance(size, int) and isinstance(looped.get("reads"), int)):
        raise TypeError("looped has no size of the shape or no number of reads")


def _check_launches(launches: Any) -> None:
    if not isinstance(launches, dict):
        raise TypeError(f"launches is {launches!r}, not an object")
    for provider, counts in launches.items():
        if not isinstance(counts, dict) or not counts.keys() <= LAUNCH_US.keys():
            raise TypeError(f"launches of {provider!r} are not by kind: {', '.join(LAUNCH_US)}")
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise TypeError(f"launches of {provider!r} are not numbers")
