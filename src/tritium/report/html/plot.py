"""Two logarithmic plots as SVG: contractions on the roofline, all other kernels against the bandwidth.

A kernel without contractions has no meaningful operation count, so it is not placed on a roofline. Its bytes and its
transfer rate are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tritium.report.html.kernels import Kernels, Row
from tritium.report.units import bytes_text, number, percent, rate

WIDTH, HEIGHT = 520, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 24, 22, 46


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
        if high - low < 2:
            high = low + 2
        return cls(10.0**low, 10.0**high, start, end)

    def at(self, value: float) -> float:
        bounded = min(max(value, self.low), self.high)
        share = math.log10(bounded / self.low) / math.log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self) -> list[float]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        step = max(1, (last - first + 5) // 6)
        return [10.0**power for power in range(first, last + 1, step)]


def roofline_plot(kernels: Kernels) -> str:
    """Plot operations per byte against operations per second; empty if a roof or all counts are missing."""
    rows = [row for row in kernels.rows if row.intensity and row.flops_per_s]
    bandwidth, peak = kernels.bandwidth, kernels.flops_per_s
    if not rows or bandwidth is None or peak is None:
        return ""
    ridge = peak / bandwidth
    intensities = [row.intensity or 0.0 for row in rows]
    x = Axis.around([*intensities, ridge / 3, ridge * 3], _LEFT, WIDTH - _RIGHT)
    y = Axis.around([*(row.flops_per_s or 0.0 for row in rows), peak * 1.5], HEIGHT - _BOTTOM, _TOP)
    # Start the roof where it enters the plot from below.
    start = max(x.low, y.low / bandwidth)
    roof = [(x.at(start), y.at(start * bandwidth)), (x.at(ridge), y.at(peak)), (x.at(x.high), y.at(peak))]
    marks = [_mark(row, x.at(row.intensity or 0.0), y.at(row.flops_per_s or 0.0), _of_contraction(row)) for row in rows]
    said = [
        _said(x.at(x.high) - 4, y.at(peak) - 6, f"{rate(peak, 'FLOP/s')} ({kernels.dtype})", "end"),
        _said(*_beside_slope(x, y, bandwidth, start, ridge), rate(bandwidth, "B/s"), "end"),
    ]
    lines = f'<polyline class="roof" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in roof)}"/>'
    axes = _axes(x, y, "operations a byte", [number(value) for value in x.decades()], "FLOP/s")
    return _svg("roofline", "Contractions on the roofline", axes + lines + "".join(said) + "".join(marks))


def bandwidth_plot(kernels: Kernels) -> str:
    """Plot bytes per launch against bytes per second for measured kernels without contractions, if any."""
    rows = (
        [row for row in kernels.rows if not row.kernel.flops and row.bytes_per_s and row.moved]
        if kernels.measured
        else []
    )
    bandwidth = kernels.bandwidth
    if not rows or bandwidth is None:
        return ""
    x = Axis.around([float(row.moved) for row in rows], _LEFT, WIDTH - _RIGHT)
    y = Axis.around([*(row.bytes_per_s or 0.0 for row in rows), bandwidth * 1.5], HEIGHT - _BOTTOM, _TOP)
    level = y.at(bandwidth)
    roof = f'<line class="roof" x1="{_LEFT}" y1="{level:.1f}" x2="{WIDTH - _RIGHT}" y2="{level:.1f}"/>'
    said = _said(WIDTH - _RIGHT - 4, level - 6, f"a large copy: {rate(bandwidth, 'B/s')}", "end")
    marks = [_mark(row, x.at(float(row.moved)), y.at(row.bytes_per_s or 0.0), _of_memory(row)) for row in rows]
    axes = _axes(x, y, "bytes a launch", [_decimal_bytes(value) for value in x.decades()], "B/s")
    return _svg("bandwidth", "Other kernels against the bandwidth", axes + roof + said + "".join(marks))


def _beside_slope(x: Axis, y: Axis, bandwidth: float, start: float, ridge: float) -> tuple[float, float]:
    middle = math.sqrt(max(start, x.low) * ridge)
    return x.at(middle) - 8, y.at(middle * bandwidth)


def _decimal_bytes(value: float) -> str:
    return rate(value, "B")


def _of_contraction(row: Row) -> str:
    return f"{rate(row.flops_per_s or 0.0, 'FLOP/s')} at {number(row.intensity)} operations a byte"


def _of_memory(row: Row) -> str:
    return f"{rate(row.bytes_per_s or 0.0, 'B/s')}, {bytes_text(row.moved)} a launch"


def _mark(row: Row, x: float, y: float, said: str) -> str:
    # The area of a mark is proportional to its share of the time.
    radius = 3.5 + 13 * math.sqrt(row.share or 0.0)
    text = f"{row.kernel.name}: {said}; {percent(row.share)} of the time, {percent(row.of_limit)} of the limit"
    return (
        f'<circle class="mark {escape(row.kernel.kind)}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" '
        f'data-kernel="{escape(row.graph + " " + row.kernel.name)}"><title>{escape(text)}</title></circle>'
    )


def _said(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="said" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _axes(x: Axis, y: Axis, x_label: str, x_names: Sequence[str], y_unit: str) -> str:
    parts = []
    for value, name in zip(x.decades(), x_names, strict=True):
        at = x.at(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
        )
    for value in y.decades():
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(rate(value, y_unit))}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts)


def _svg(name: str, title: str, inner: str) -> str:
    return (
        f'<svg class="plot" id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{inner}</svg>"
    )
