"""Skipping on the page: a diagram of steps and blocks of the last image of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritium.report.records import Component

# Pixels of a step and of a block; blocks of large models are combined to groups.
STEP, BLOCK, LEFT, BOTTOM = 16, 6, 72, 18
MOST_ROWS = 24

KINDS = {
    "run": "computed",
    "forecast": "forecast",
    "derived": "derived from the first branch",
    "kept": "change of the blocks put back",
    "attention": "attention reused",
}

_BY_LETTER = {"R": "run", "0": "forecast", "1": "forecast", "2": "forecast", "D": "derived"}


@dataclass(frozen=True)
class Cell:
    """A step of a group of blocks."""

    x: int
    y: int
    kind: str
    title: str


@dataclass(frozen=True)
class Branch:
    """The diagram of one branch of a part."""

    title: str
    cells: list[Cell]
    width: int
    height: int
    # Numbers under steps, by position.
    numbers: list[tuple[float, int]]


@dataclass(frozen=True)
class Skipped:
    """The last image of a part."""

    part: str
    text: str
    branches: list[Branch]


def skipped(components: Sequence[Component]) -> list[Skipped]:
    """Return the last image of each part that has a table."""
    found = []
    for component in components:
        data = component.techniques.get("skip")
        last = None if data is None else data.get("last")
        if data is None or last is None:
            continue
        blocks = last["blocks"]
        text = f"{blocks['done']} of {blocks['without']} block executions, {blocks['planned']} planned"
        text = ". ".join(
            [text, *(f"Every step ran: {reason}" for reason in data["declined"]), *filter(None, [data["loss"]])]
        )
        branches = [_branch(place, row, last["begin"], data) for place, row in enumerate(last["rows"])]
        found.append(Skipped(component.name, text, branches))
    return found


def _branch(place: int, row: str, begin: int, data: dict[str, Any]) -> Branch:
    count = max(1, int(data["block_count"]))
    group = -(-count // MOST_ROWS)
    rows = -(-count // group)
    cells = []
    for column, letter in enumerate(row):
        for number in range(rows):
            first, last = number * group, min(count, (number + 1) * group) - 1
            kind = _kind(letter, first, last, data["span"])
            if kind is not None:
                which = f"block {first + 1}" if first == last else f"blocks {first + 1} to {last + 1}"
                title = f"step {begin + column + 1}, {which}: {KINDS[kind]}"
                cells.append(Cell(LEFT + column * STEP, number * BLOCK, kind, title))
    width, height = LEFT + len(row) * STEP, rows * BLOCK + BOTTOM
    numbers = [(LEFT + (column + 0.5) * STEP, begin + column + 1) for column in range(0, len(row), 4)]
    return Branch(f"branch {place + 1}", cells, width, height, numbers)


def _kind(letter: str, first: int, last: int, span: Sequence[int] | None) -> str | None:
    """Return what a group of blocks did in a step, None for a step that the branch did not have."""
    if letter in _BY_LETTER:
        return _BY_LETTER[letter]
    if letter not in "BA" or span is None:
        return None
    # A group counts as left out if most of it is.
    inside = min(last + 1, span[1]) - max(first, span[0])
    return ("kept" if letter == "B" else "attention") if 2 * inside > last + 1 - first else "run"
