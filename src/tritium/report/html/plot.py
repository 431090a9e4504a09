"""Two logarithmic plots: contractions on the roofline, all other kernels against the bandwidth.

A kernel without contractions has no meaningful operation count, so it is not placed on a roofline. Its bytes and its
transfer rate are known. The template draws the plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tritium.report import units
from tritium.report.html.kernels import Kernels, Row
from tritium.report.units import bytes_text, number, rate

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 88.0, WIDTH - 24.0, 22.0, HEIGHT - 46.0


@dataclass(frozen=True)
class Axis:
    """A logarithmic scale of at least two whole decades around some values, from `start` to `end` in pixels."""

    values: Sequence[float]
    start: float
    end: float
    form: Callable[[float], str]

    @property
    def powers(self) -> tuple[int, int]:
        low, high = math.floor(math.log10(min(self.values))), math.ceil(math.log10(max(self.values)))
        return low, max(high, low + 2)

    @property
    def low(self) -> float:
        return 10.0 ** self.powers[0]

    @property
    def high(self) -> float:
        return 10.0 ** self.powers[1]

    def at(self, value: float) -> float:
        low, high = self.powers
        share = (math.log10(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        low, high = self.powers
        decades = [10.0**power for power in range(low, high + 1, max(1, (high - low + 5) // 6))]
        return [(self.at(value), self.form(value)) for value in decades]


@dataclass(frozen=True)
class Mark:
    """A kernel in a plot."""

    row: Row
    x: float
    y: float
    text: str

    @property
    def radius(self) -> float:
        # The area of a mark is proportional to its share of the time.
        return 3.5 + 13 * math.sqrt(self.row.share or 0.0)

    @property
    def title(self) -> str:
        share, of_limit = map(units.optional(units.percent), (self.row.share, self.row.of_limit))
        return f"{self.row.kernel.name}: {self.text}; {share} of the time, {of_limit} of the limit"


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    x_label: str
    x: Axis
    y: Axis
    roof: list[tuple[float, float]]
    marks: list[Mark]
    # Texts left of and above a pixel.
    notes: list[tuple[float, float, str]]


def roofline_plot(kernels: Kernels) -> Plot | None:
    """Plot operations per byte against operations per second; None if a roof or all counts are missing."""
    bandwidth, peak = kernels.bandwidth, kernels.flops_per_s
    marks = [
        Mark(row, row.intensity, speed, f"{rate(speed, 'FLOP/s')} at {number(row.intensity)} operations a byte")
        for row in kernels.rows
        if row.intensity and (speed := row.flops_per_s)
    ]
    if not marks or bandwidth is None or peak is None:
        return None
    ridge = peak / bandwidth
    x = Axis([*(mark.x for mark in marks), ridge / 3, ridge * 3], LEFT, RIGHT, number)
    y = Axis([*(mark.y for mark in marks), peak * 1.5], BOTTOM, TOP, partial(rate, unit="FLOP/s"))
    # Start the roof where it enters the plot from below.
    start = max(x.low, y.low / bandwidth)
    middle = math.sqrt(start * ridge)
    roof = [(start, start * bandwidth), (ridge, peak), (x.high, peak)]
    notes = [
        (RIGHT - 4, y.at(peak) - 6, f"{rate(peak, 'FLOP/s')} ({kernels.dtype})"),
        (x.at(middle) - 8, y.at(middle * bandwidth), rate(bandwidth, "B/s")),
    ]
    return Plot("roofline", "Contractions on the roofline", "operations a byte", x, y, roof, marks, notes)


def bandwidth_plot(kernels: Kernels) -> Plot | None:
    """Plot bytes per launch against bytes per second for measured kernels without contractions, if any."""
    bandwidth = kernels.bandwidth
    marks = [
        Mark(row, row.moved, speed, f"{rate(speed, 'B/s')}, {bytes_text(row.moved)} a launch")
        for row in kernels.rows
        if kernels.measured and not row.kernel.flops and (speed := row.bytes_per_s)
    ]
    if not marks or bandwidth is None:
        return None
    x = Axis([mark.x for mark in marks], LEFT, RIGHT, partial(rate, unit="B"))
    y = Axis([*(mark.y for mark in marks), bandwidth * 1.5], BOTTOM, TOP, partial(rate, unit="B/s"))
    roof = [(x.low, bandwidth), (x.high, bandwidth)]
    notes = [(RIGHT - 4, y.at(bandwidth) - 6, f"a large copy: {rate(bandwidth, 'B/s')}")]
    return Plot("bandwidth", "Other kernels against the bandwidth", "bytes a launch", x, y, roof, marks, notes)
