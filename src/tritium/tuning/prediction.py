"""Predict what a site costs from the measured shapes near it.

A kernel takes a floor, which short kernels take whatever they compute, and then the time of its work at a rate:

    time = FLOOR_US + work / rate(op, forms, provider)

Work is the product of the sizes: elements of an op that moves memory, multiplications of a product. The rate at a shape is
the mean of the rates of the measured shapes, weighted by distance: memory-bound ops reach another share of the bandwidth
at another width, and products another share of the arithmetic. Nothing is predicted far from every measured shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tritium.tuning.costs import INDUCTOR, Cost, Site
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
    distances = [(row, distance(row.key, key)) for row in rows if row.owned and is_comparable(row.key, key)]
    near = [(row, apart) for row, apart in distances if apart is not None and _has_rate(row, key)]
    if not near:
        return None
    near.sort(key=lambda pair: pair[1])
    nearest = near[0][0]
    sites = [(row.key, row.site(), 1 / (apart + 0.25)) for row, apart in near]
    base = nearest.site()
    costs = {}
    for provider in nearest.ms:
        measured = [
            (other, site.costs[provider].device_us, weight) for other, site, weight in sites if provider in site.costs
        ]
        costs[provider] = Cost(_device_us(key, measured), base.costs[provider].host_us)
    site = Site(costs, 0.0, base.host_noise_us, base.host_source)
    return Prediction(site.replayed() if replayed else site, len(near), nearest.key)


def _has_rate(row: Verdict, key: Key) -> bool:
    """Return False if a row's times say nothing about the work at a key: at the floor they do not grow with it."""
    shortest = min(cost.device_us for cost in row.site().costs.values())
    return shortest >= 2 * FLOOR_US or work(key) <= work(row.key)


def _device_us(key: Key, measured: Sequence[tuple[Key, float, float]]) -> float:
    """Return the time at a key, given measured keys, their times and weights."""
    total = sum(weight for _, _, weight in measured)
    # No rate is negative: of a kernel that is shorter than the floor, a tenth counts as work.
    inverse = sum(weight * math.log(max(us - FLOOR_US, us / 10) / work(known)) for known, us, weight in measured)
    return FLOOR_US + work(key) * math.exp(inverse / total)


def work(key: Key) -> int:
    """Return the product of the sizes of a key.

    >>> work(Key("cat_linear", "tokens=2 k=3+4 n=5", "bfloat16")), work(Key("attention", "tokens=8 keys=same width=2", "bfloat16"))
    (70, 128)
    """
    sizes = {name: sum(numbers) for name, numbers in key.numbers().items() if name not in FORMS and numbers}
    # As many keys as there are queries.
    if key.sizes().get("keys") == SAME:
        sizes["keys"] = sizes.get("tokens", 1)
    return math.prod(max(1, size) for size in sizes.values())


def is_comparable(known: Key, wanted: Key) -> bool:
    """Return True if two keys are of one op, one dtype size, and the same forms."""
    dtypes = known.dtype == wanted.dtype or (known.dtype in HALF and wanted.dtype in HALF)
    return known.op == wanted.op and dtypes and _forms(known) == _forms(wanted)


def _forms(key: Key) -> list[tuple[str, int | str]]:
    """Return what must be equal: named variants, sizes in FORMS, and how many numbers each other size has."""
    numbers = key.numbers()
    return [(name, size if name in FORMS else len(numbers[name]) or size) for name, size in key.sizes().items()]


def distance(known: Key, wanted: Key) -> float | None:
    """Return how far two shapes of one form are apart: squared octaves, fewer along tokens; None if that is too far."""
    total, theirs = 0.0, wanted.numbers()
    for name, sizes in known.numbers().items():
        if name in FORMS:
            continue
        is_long = name in LONG
        for one, other in zip(sizes, theirs[name], strict=True):
            octaves = abs(math.log2(max(1, one) / max(1, other)))
            if octaves > math.log2(NEAR_LONG if is_long else NEAR):
                return None
            total += (octaves / 2 if is_long else octaves) ** 2
    return total
