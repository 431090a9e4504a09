"""The chart on the front page, from a committed result: speed against quality of ways to skip steps, as SVG."""

from __future__ import annotations

import json
from dataclasses import dataclass
from xml.sax.saxutils import escape

import measured

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 66.0, WIDTH - 208.0, 46.0, HEIGHT - 52.0
FASTEST, LEAST, MOST = 3.5, 15.0, 70.0
BUDGET = 32.0


@dataclass(frozen=True)
class Series:
    """Ways of one kind: the beginning of their names in the results, the words of the chart, and how they look."""

    prefix: str
    words: str
    colour: str
    shape: str


SERIES = (
    Series("eager, ", "Tritium, searched table", "#5e35b1", "circle"),
    Series("eager, Skip.window()", "Tritium, Skip.window()", "#9575cd", "circle"),
    Series("eager, Skip(adaptive", "Tritium, Skip(adaptive=...)", "#b39ddb", "circle"),
    Series("diffusers TaylorSeer", "diffusers TaylorSeer", "#00838f", "square"),
    Series("diffusers MagCache", "diffusers MagCache", "#ef6c00", "square"),
    Series("diffusers FirstBlockCache", "diffusers FirstBlockCache", "#2e7d32", "square"),
    Series("cache-dit", "cache-dit DBCache", "#c62828", "square"),
)


def points() -> dict[Series, list[tuple[float, float, float]]]:
    """Return the speed-up, and the PSNR of the median and the worst job, of every way with a loss."""
    path = measured.results() / "cpu-2-cores-skip.json"
    if not path.is_file():
        return {}
    found: dict[Series, list[tuple[float, float, float]]] = {series: [] for series in SERIES}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        kinds = [series for series in SERIES if row["variant"].startswith(series.prefix)]
        if kinds and row["psnr_median"] is not None:
            series = max(kinds, key=lambda series: len(series.prefix))
            found[series].append((row["cpu_ratio"], row["psnr_median"], row["psnr_worst"]))
    return {series: sorted(rows) for series, rows in found.items() if rows}


def x(speed: float) -> float:
    return round(LEFT + (speed - 1) / (FASTEST - 1) * (RIGHT - LEFT), 1)


def y(level: float) -> float:
    return round(BOTTOM - (level - LEAST) / (MOST - LEAST) * (BOTTOM - TOP), 1)


def text(at: tuple[float, float], words: str, *, size: float = 12, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{at[0]}" y="{at[1]}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text {place} font-family="sans-serif">{escape(words)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    return f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" {style}/>'


def mark(at: tuple[float, float], series: Series) -> str:
    if series.shape == "circle":
        return f'<circle cx="{at[0]}" cy="{at[1]}" r="5.5" fill="{series.colour}"/>'
    return f'<rect x="{at[0] - 4.5:.1f}" y="{at[1] - 4.5:.1f}" width="9" height="9" fill="{series.colour}"/>'


def axes() -> list[str]:
    parts = []
    for tenth in range(10, int(FASTEST * 10) + 1, 5):
        parts.append(line((x(tenth / 10), TOP), (x(tenth / 10), BOTTOM), 'stroke="#eee"'))
        parts.append(text((x(tenth / 10), BOTTOM + 18), f"{tenth / 10:g}x", anchor="middle"))
    for level in range(20, int(MOST) + 1, 10):
        parts.append(line((LEFT, y(level)), (RIGHT, y(level)), 'stroke="#eee"'))
        parts.append(text((LEFT - 8, y(level) + 4), f"{level} dB", anchor="end"))
    parts.append(line((LEFT, y(BUDGET)), (RIGHT, y(BUDGET)), 'stroke="#888" stroke-dasharray="5 4"'))
    parts.append(text((LEFT + 4, y(BUDGET) + 15), f"a budget of {BUDGET:g} dB", size=11, colour="#666"))
    parts.append(text(((LEFT + RIGHT) / 2, HEIGHT - 14), "speed-up of the denoiser over eager", anchor="middle"))
    return [*parts, text((LEFT, 26), "PSNR of images: marks are the median of 8 jobs, lines end at the worst", size=13)]


def speed_against_quality() -> str:
    """Return the chart as SVG, or an empty text without the committed result."""
    found = points()
    if not found:
        return ""
    parts = axes()
    for place, (series, rows) in enumerate(found.items()):
        for speed, median, worst in rows:
            parts.append(
                line((x(speed), y(median)), (x(speed), y(worst)), f'stroke="{series.colour}" stroke-opacity="0.45"')
            )
            parts.append(mark((x(speed), y(median)), series))
        parts.append(mark((RIGHT + 22, TOP + 8 + 24 * place), series))
        parts.append(text((RIGHT + 34, TOP + 12 + 24 * place), series.words))
    label = "Speed against quality of ways to skip steps of the example pipeline"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"
