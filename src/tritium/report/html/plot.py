"""Two logarithmic plots: contractions on the roofline, all other kernels against the bandwidth.

A kernel without contractions has no meaningful operation count, so it is not placed on a roofline. Its bytes and its
transfer rate are known. The template draws the plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tritium.report.html.kernels import Kernels, Row
from tritium.report.units import bytes_text, number, percent, rate

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 88, WIDTH - 24, 22, HEIGHT - 46


@dataclass(frozen=True)
class Axis:
    """A logarithmic scale from a range of values to pixels."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """Return an axis of at least two whole decades that contains all values."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(10.0**low, 10.0 ** max(high, low + 2), start, end)

    def at(self, value: float) -> float:
        bounded = min(max(value, self.low), self.high)
        share = math.log10(bounded / self.low) / math.log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    @property
    def decades(self) -> list[float]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, max(1, (last - first + 5) // 6))]


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
        row = self.row
        return f"{row.kernel.name}: {self.text}; {percent(row.share)} of the time, {percent(row.of_limit)} of the limit"


@dataclass(frozen=True)
class Plot:
    """A plot in the values of its axes."""

    name: str
    title: str
    x: Axis
    y: Axis
    x_label: str
    x_ticks: list[str]
    y_unit: str
    roof: list[tuple[float, float]]
    marks: list[Mark]
    # Texts left of and above a pixel.
    notes: list[tuple[float, float, str]]

    @property
    def y_ticks(self) -> list[str]:
        return [rate(value, self.y_unit) for value in self.y.decades]


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
    x = Axis.around([*(mark.x for mark in marks), ridge / 3, ridge * 3], LEFT, RIGHT)
    y = Axis.around([*(mark.y for mark in marks), peak * 1.5], BOTTOM, TOP)
    # Start the roof where it enters the plot from below.
    start = max(x.low, y.low / bandwidth)
    middle = math.sqrt(start * ridge)
    return Plot(
        name="roofline",
        title="Contractions on the roofline",
        x=x,
        y=y,
        x_label="operations a byte",
        x_ticks=list(map(number, x.decades)),
        y_unit="FLOP/s",
        roof=[(start, start * bandwidth), (ridge, peak), (x.high, peak)],
        marks=marks,
        notes=[
            (x.at(x.high) - 4, y.at(peak) - 6, f"{rate(peak, 'FLOP/s')} ({kernels.dtype})"),
            (x.at(middle) - 8, y.at(middle * bandwidth), rate(bandwidth, "B/s")),
        ],
    )


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
    x = Axis.around([mark.x for mark in marks], LEFT, RIGHT)
    y = Axis.around([*(mark.y for mark in marks), bandwidth * 1.5], BOTTOM, TOP)
    return Plot(
        name="bandwidth",
        title="Other kernels against the bandwidth",
        x=x,
        y=y,
        x_label="bytes a launch",
        x_ticks=[rate(value, "B") for value in x.decades],
        y_unit="B/s",
        roof=[(x.low, bandwidth), (x.high, bandwidth)],
        marks=marks,
        notes=[(RIGHT - 4, y.at(bandwidth) - 6, f"a large copy: {rate(bandwidth, 'B/s')}")],
    )
