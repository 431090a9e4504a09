"""Predict what a site costs from the measured shapes near it.

A kernel takes a floor, which short kernels take whatever they compute, and then the time of its work at a rate:

    time = FLOOR_US + work / rate(op, forms, provider)

Work is the product of the sizes: elements of an op that moves memory, multiplications of a product. The rate at a shape is
the mean of the rates of the measured shapes, weighted by distance: memory-bound ops reach another share of the bandwidth
at another width, and products another share of the arithmetic. Nothing is predicted far from every measured shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tritium.ops import INDUCTOR
from tritium.tuning.costs import Cost, Site
from tritium.tuning.verdict import Key, Verdict

# The shortest kernels of the H200's table take 1.7 to 2.5 us, of which their bytes would take 0.2.
FLOOR_US = 1.5

# The sizes along which a kernel only does more of the same.
LONG = ("tokens", "pixels")
# Sizes that select code instead of adding work.
FORMS = ("groups", "parts")

# A size that equals `tokens`.
SAME = "same"

# A shape is near a measured one if no size differs by more than these factors: sizes of LONG, and others.
NEAR_LONG = 64
NEAR = 4

# Types of 16 bits move the same bytes and have the same arithmetic rate.
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Prediction:
    """The costs predicted for a site, the number of measured shapes behind them, and the nearest of those."""

    site: Site
    count: int
    nearest: Key

    def why(self, provider: str) -> str:
        """Return the reason that reports give about an owned provider."""
        ours, theirs = self.site.costs[provider], self.site.costs[INDUCTOR]
        plural = "s" if self.count > 1 else ""
        return (
            f"predicted {self.site.ratio(provider):.2f}x from {self.count} measured shape{plural} (nearest "
            f"{self.nearest.shape}; {provider} {ours.device_us:.1f}, inductor {theirs.device_us:.1f} us; "
            f"{self.site.host_text(provider)})"
        )


def predict(key: Key, rows: Iterable[Verdict], *, replayed: bool = False) -> Prediction | None:
    """Return the costs at a key by the rows of its op and forms, or None if none of them is near."""
    near = []
    for row in rows:
        apart = distance(row.key, key) if row.owned else None
        if apart is None:
            continue
        site = row.site()
        # The times of kernels at the floor say nothing about more work: they do not grow with it.
        if min(cost.device_us for cost in site.costs.values()) >= 2 * FLOOR_US or log_work(key) <= log_work(row.key):
            near.append((apart, row.key, site))
    if not near:
        return None
    _, nearest, base = min(near, key=lambda row: row[0])
    costs = {}
    for provider in base.costs:
        total = inverse = 0.0
        for apart, measured, site in near:
            if provider in site.costs:
                us, weight = site.costs[provider].device_us, 1 / (apart + 0.25)
                # No rate is negative: of a kernel that is shorter than the floor, a tenth counts as work.
                inverse += weight * (math.log(max(us - FLOOR_US, us / 10)) - log_work(measured))
                total += weight
        costs[provider] = Cost(FLOOR_US + math.exp(log_work(key) + inverse / total), base.costs[provider].host_us)
    site = Site(costs, 0.0, base.host_noise_us, base.host_source)
    return Prediction(site.replayed() if replayed else site, len(near), nearest)


def log_work(key: Key) -> float:
    """Return the logarithm of the product of the sizes of a key.

    >>> round(math.exp(log_work(Key("cat_linear", "tokens=2 k=3+4 n=5", "bfloat16"))))
    70
    >>> round(math.exp(log_work(Key("attention", "tokens=8 keys=same width=2", "bfloat16"))))
    128
    """
    sizes = {name: sum(numbers) for name, numbers in key.numbers().items() if name not in FORMS and numbers}
    # As many keys as there are queries.
    if key.sizes().get("keys") == SAME:
        sizes["keys"] = sizes.get("tokens", 1)
    return sum(math.log(max(1, size)) for size in sizes.values())


def distance(known: Key, wanted: Key) -> float | None:
    """Return how far two keys are apart: squared octaves, fewer along tokens; None if they are not comparable or too far."""
    dtypes = known.dtype == wanted.dtype or (known.dtype in HALF and wanted.dtype in HALF)
    if known.op != wanted.op or not dtypes or _forms(known) != _forms(wanted):
        return None
    total, theirs = 0.0, wanted.numbers()
    for name, sizes in known.numbers().items():
        if name in FORMS:
            continue
        is_long = name in LONG
        for one, other in zip(sizes, theirs[name], strict=True):
            octaves = abs(math.log2(max(1, one)) - math.log2(max(1, other)))
            if octaves > math.log2(NEAR_LONG if is_long else NEAR):
                return None
            total += (octaves / 2 if is_long else octaves) ** 2
    return total


def _forms(key: Key) -> list[tuple[str, int | str]]:
    """Return what must be equal: named variants, sizes in FORMS, and how many numbers each other size has."""
    numbers = key.numbers()
    return [(name, size if name in FORMS else len(numbers[name]) or size) for name, size in key.sizes().items()]
