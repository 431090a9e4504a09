"""What a search tried, as a page: speed against quality, with every way that was run on all jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.report.html import FOLDER, template

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64.0, WIDTH - 24.0, 24.0, HEIGHT - 52.0

# The height of images that equal their references: their PSNR is infinite.
EQUAL = 100.0

_KINDS = {"engine": "without skipping", "skip": "with a table", "fewer steps": "fewer steps of the scheduler"}


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    kind: str
    inside: bool
    kept: bool
    title: str


@dataclass(frozen=True)
class Chart:
    """Speed from left to right, the PSNR of the median job from bottom to top."""

    points: list[Point]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    # The height of the limit on PSNR; None if the budget has none.
    limit: float | None


def chart(rows: Sequence[Mapping[str, Any]], min_psnr: float | None) -> Chart:
    """Return the positions of all rows, the kept one last so that it is on top."""
    speeds = [float(row["speed"]) for row in rows]
    levels = [_level(row) for row in rows] + ([] if min_psnr is None else [min_psnr])
    fastest = math.ceil(max(speeds) * 2) / 2
    y_low, y_high = math.floor(min(levels) / 5) * 5 - 5, math.ceil(max(levels) / 5) * 5 + 5

    def x(speed: float) -> float:
        return LEFT + speed / fastest * (RIGHT - LEFT)

    def y(level: float) -> float:
        return BOTTOM - (level - y_low) / (y_high - y_low) * (BOTTOM - TOP)

    points = [
        Point(
            round(x(row["speed"]), 1),
            round(y(_level(row)), 1),
            row["kind"].replace(" ", "-"),
            row["inside"],
            row["kept"],
            f"{row['name']}: {row['speed']:.2f}x, median PSNR {_shown(row)}; {row['why']}",
        )
        for row in sorted(rows, key=lambda row: row["kept"])
    ]
    step = 10 if y_high - y_low > 40 else 5
    y_ticks = [(round(y(level), 1), f"{level} dB") for level in range(int(y_low), int(y_high) + 1, step)]
    x_ticks = [(round(x(half / 2), 1), f"{half / 2:g}x") for half in range(int(fastest * 2) + 1)]
    return Chart(points, x_ticks, y_ticks, None if min_psnr is None else round(y(min_psnr), 1))


def _level(row: Mapping[str, Any]) -> float:
    median = row["psnr"]["median"]
    return EQUAL if median is None else min(EQUAL, float(median))


def _shown(row: Mapping[str, Any]) -> str:
    return "of equal images" if row["psnr"]["median"] is None else f"{row['psnr']['median']:.1f} dB"


def page(recipe: Mapping[str, Any], title: str) -> str:
    """Render the page for a recipe: the chart and the table of what was tried."""
    figures = recipe["figures"]
    complete = [row for row in figures["tried"] if row["jobs"] == len(figures["jobs"])]
    return template("tried.html.jinja", "the search as a page").render(
        title=title,
        figures=figures,
        rows=sorted(figures["tried"], key=lambda row: -row["speed"]),
        chart=chart(complete, figures["budget"].get("min_psnr")),
        kinds=_KINDS,
        choices={name: choice for name, choice in recipe["choices"].items() if choice != {"how": "eager"}},
        shown=_shown,
        size=(WIDTH, HEIGHT),
        edges=(LEFT, RIGHT, TOP, BOTTOM),
        style=(FOLDER / "report.css").read_text(encoding="utf-8"),
    )
