"""One tuning result: its key, the times of each provider, the costs of the site that follow, and the choice by these.

A caller waits for the device where kernels are longer than their launches, and for the host where they are shorter. Which
of the two a graph waits for is not known when it is compiled. So a provider is used only where it is at least 3 % faster
by the longer of both, and where the shorter does not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from tritium.ops import INDUCTOR

# The sizes of a shape along which a kernel only does more of the same.
LONG = ("tokens", "pixels")

# Host time of one launch in an Inductor graph, in microseconds: an H200's host, 60 launches in a row (docs/performance.md).
# An "operator" is one that generated code calls through PyTorch's dispatcher: 20.8 us with one launch.
LAUNCH_US = {"generated": 5.2, "owned": 5.3, "library": 15.3, "operator": 15.5}

# An owned provider must save this share of the time of Inductor's code for the region.
MARGIN = 0.03

# Of two blocks whose times differ by less than this share, neither is faster.
NOISE = 0.01

# The reason of a site whose host time does not count.
REPLAYED = "replayed: the host's time does not count"

# Microseconds that must be saved on the device for each that the host pays more, and the other way round.
EXCHANGE = 3


@dataclass(frozen=True)
class Key:
    """The subject of a verdict: an op, the class of its shape, and the dtype."""

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

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of each size; none for a name.

        >>> Key("cat_linear", "tokens=64 k=4096+16384 layout=rows", "bfloat16").numbers()
        {'tokens': [64], 'k': [4096, 16384], 'layout': []}
        """
        pieces = {name: str(size).split("+") for name, size in self.sizes().items()}
        return {name: list(map(int, texts)) if all(map(str.isdecimal, texts)) else [] for name, texts in pieces.items()}


@dataclass(frozen=True)
class Cost:
    """Microseconds of one site with one provider: its kernels on the device, and their launches on the host."""

    device_us: float
    host_us: float

    @property
    def wait_us(self) -> float:
        """The time that a caller waits for."""
        return max(self.device_us, self.host_us, 1e-6)


@dataclass(frozen=True)
class Site:
    """The costs of one site by provider, and the differences that are noise."""

    costs: Mapping[str, Cost]
    device_noise_us: float = 0.0
    host_noise_us: float = 0.0
    # Where the host's times come from: measured, or launches times the time of one; empty where they are assumed equal.
    host_source: str = ""

    def ratio(self, provider: str) -> float:
        """Return how many times as long a caller waits for Inductor's code."""
        return self.costs[INDUCTOR].wait_us / self.costs[provider].wait_us

    def choose(self) -> str:
        """Return the provider with the shortest wait among those that are safe, or `inductor`.

        >>> Site({"inductor": Cost(10.0, 5.2), "triton": Cost(8.0, 5.3)}, host_noise_us=0.2).choose()
        'triton'
        >>> Site({"inductor": Cost(10.0, 5.2), "triton": Cost(8.0, 60.0)}).choose()
        'inductor'
        """
        safe = [name for name in self.costs if name != INDUCTOR and self._is_safe(name)]
        return min(safe, key=lambda name: self.costs[name].wait_us, default=INDUCTOR)

    def replayed(self) -> Site:
        """Return the site in a graph that is captured and replayed: the kernels alone count.

        >>> Site({"inductor": Cost(10.0, 5.2), "triton": Cost(8.0, 60.0)}).replayed().choose()
        'triton'
        """
        costs = {name: Cost(cost.device_us, 0.0) for name, cost in self.costs.items()}
        return Site(costs, self.device_noise_us, 0.0, REPLAYED)

    def among(self, providers: Iterable[str]) -> Site:
        """Return the site with `inductor` and these providers alone."""
        names = {INDUCTOR, *providers}
        return replace(self, costs={name: cost for name, cost in self.costs.items() if name in names})

    def host_text(self, provider: str) -> str:
        """Return the part of a reason that tells the host's time of a provider against Inductor's."""
        if self.host_source in ("", REPLAYED):
            return self.host_source or "host not measured"
        extra = self.costs[provider].host_us - self.costs[INDUCTOR].host_us
        return f"host {extra:+.1f} us, {self.host_source}"

    def _is_safe(self, provider: str) -> bool:
        theirs, ours = self.costs[INDUCTOR], self.costs[provider]
        device, host = theirs.device_us - ours.device_us, theirs.host_us - ours.host_us
        return (
            theirs.wait_us - ours.wait_us >= max(MARGIN * theirs.wait_us, 1e-9)
            and (device > self.device_noise_us or host > self.host_noise_us)
            # A loss in one time is noise, or is paid for by the other.
            and (host >= -self.host_noise_us or -host * EXCHANGE <= device)
            and (device >= -self.device_noise_us or -device * EXCHANGE <= host)
        )


def launches_us(launches: Mapping[str, int]) -> float:
    """Return the host's time for some launches by kind."""
    return round(sum(LAUNCH_US[kind] * count for kind, count in launches.items()), 3)


@dataclass(frozen=True)
class Loop:
    """The size of a key that an Inductor kernel loops over, and the values it loads for each position."""

    size: str
    reads: int


@dataclass(frozen=True)
class Verdict:
    """The winner for one key, median times per provider, and why others were not measured.

    Providers of most ops are compared inside a compiled block, where `inductor` is one of them. Ops that are measured at
    their first call are compared alone.
    """

    key: Key
    # The provider that these numbers choose; on a GPU, for a graph that is not replayed.
    provider: str
    # Milliseconds on the device, by provider: of the compiled block, or of the op if it is compared alone.
    ms: Mapping[str, float]
    # For a block: microseconds of the op alone on the device.
    alone_us: Mapping[str, float] = field(default_factory=dict)
    # Microseconds in which the host issues a call of the block without waiting for it. Rows without it have launches.
    issue_us: Mapping[str, float] = field(default_factory=dict)
    # Launches of the block by kind, counted in generated code; the host's time is their number times the time of one.
    launches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # None if Inductor's kernel holds rows in registers or reduces nothing. The row says nothing about a graph in which
    # Inductor's kernel is of the other form.
    looped: Loop | None = None
    # The fewest bytes the op must move: inputs once, outputs once.
    bytes: int = 0
    # Versions of the packages that the times depend on, at least torch.
    versions: Mapping[str, str] = field(default_factory=dict)
    # Why a provider was not measured, or was dropped.
    remarks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that cannot be measurements."""
        if not self.ms:
            raise ValueError("ms has no times")
        for name in ("ms", "alone_us", "issue_us"):
            times = getattr(self, name).values()
            # A key that could not be measured has Inductor's entry alone, and no time.
            if not all(0 <= time < math.inf for time in times) or (len(times) > 1 and not all(times)):
                raise ValueError(f"{name} has a value that is not a time")
        if any(counts.keys() - LAUNCH_US.keys() for counts in self.launches.values()):
            raise ValueError(f"launches are not counts by kind: {', '.join(LAUNCH_US)}")

    @property
    def in_block(self) -> bool:
        """True if the providers were compared in a compiled block."""
        return INDUCTOR in self.ms

    @property
    def owned(self) -> list[str]:
        return [name for name in self.ms if name != INDUCTOR]

    @property
    def ratio(self) -> float:
        """How much faster the block is on the device with the best owned provider than with Inductor's code."""
        return self.ms[INDUCTOR] / min(self.ms[name] for name in self.owned) if self.owned else 0.0

    def fastest(self, able: Iterable[str]) -> str | None:
        """Return the winner, or the fastest other provider if the winner declines; None if all of them decline."""
        names = set(able)
        order = [self.provider, *sorted(self.ms, key=self.ms.__getitem__)]
        return next((name for name in order if name in names), None)

    def site(self, *, replayed: bool = False) -> Site:
        """Return what the site alone costs inside the block.

        An owned kernel takes as long in the block as alone, so the block less that time is the time of its neighbours.
        Inductor's block less the neighbours is the time of Inductor's code in context.
        """
        block = {name: ms * 1e3 for name, ms in self.ms.items()}
        alone = [block[name] - self.alone_us[name] for name in self.owned if name in self.alone_us]
        # Each block takes longer than its neighbours, whatever the noise of the times alone.
        neighbours = max(0.0, min([*alone, *(0.99 * us for us in block.values())])) if alone else 0.0
        noise = NOISE * block[INDUCTOR]
        counts = [self.launches.get(name, {}) for name in self.ms]
        launches = dict(zip(self.ms, map(launches_us, counts), strict=True))
        shared = launches_us({kind: min(count.get(kind, 0) for count in counts) for kind in LAUNCH_US})
        own = max(launches[INDUCTOR] - shared, LAUNCH_US["generated"])
        host, source = dict.fromkeys(self.ms, own), ""
        if self.issue_us.keys() >= self.ms.keys():
            host, source = dict(self.issue_us), "measured"
        elif self.launches.keys() >= self.ms.keys():
            host, source = launches, "from launches"
        costs = {}
        for name, us in block.items():
            in_context = block[INDUCTOR] if abs(us - block[INDUCTOR]) < noise else us
            costs[name] = Cost(in_context - neighbours, own + host[name] - host[INDUCTOR])
        site = Site(costs, noise, MARGIN * host[INDUCTOR], source)
        return site.replayed() if replayed else site

    def why(self, *, replayed: bool = False) -> str:
        """Return the reason that reports give."""
        if not self.owned:
            return "; ".join(f"{name}: {remark}" for name, remark in self.remarks.items()) or "nothing else can take it"
        best = min(self.owned, key=self.ms.__getitem__)
        return (
            f"measured {self.ratio:.2f}x against Inductor in a block ({best} {self.ms[best]:.3f}, "
            f"inductor {self.ms[INDUCTOR]:.3f} ms; {self.site(replayed=replayed).host_text(best)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the row of a file, without empty fields."""
        entries = asdict(self)
        row = {**entries.pop("key"), **entries}
        return {name: value for name, value in row.items() if value not in ({}, None, 0)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Return the verdict of a row; fields of another version of the package are left out."""
        looped = Loop(**row["looped"]) if "looped" in row else None
        names = {entry.name for entry in fields(cls)} - {"key", "looped"}
        known = {name: value for name, value in row.items() if name in names}
        return cls(key=Key(row["op"], row["shape"], row["dtype"]), looped=looped, **known)
