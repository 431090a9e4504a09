"""What one site costs a caller with each provider, on the device and on the host, and which provider follows from it.

A caller waits for the device where kernels are longer than their launches, and for the host where they are shorter. Which
of the two a graph waits for is not known when it is compiled. So a provider is used only where it is at least 3 % faster
by the longer of both, and where the shorter does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tritium.ops import INDUCTOR

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
        """Return the site with `inductor` and these providers alone.

        >>> list(Site({"inductor": Cost(10.0, 5.2), "triton": Cost(8.0, 5.3)}).among([]).costs)
        ['inductor']
        """
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
    """Return the host's time for some launches by kind.

    >>> launches_us({"generated": 1, "library": 2})
    35.8
    """
    return round(sum(LAUNCH_US[kind] * count for kind, count in launches.items()), 3)
