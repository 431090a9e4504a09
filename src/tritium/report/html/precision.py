"""The precision of each linear layer of a part as a plot: a column per block, a row per layer of a block.

The template draws the plots. They show what the technique `quantize` reports about a part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tritium.report.records import Component

# Pixels: a row, the widest cell, the longest label, and the cells of a row together.
ROW, CELL, LABEL, CELLS = 16, 16, 190, 760

# The name of a layer in a repeated block: the list of blocks, the number of the block, the layer.
_IN_LIST = re.compile(r"(.+?)\.(\d+)\.(.+)")

# The formats with a colour, by the beginning of their name; longer beginnings first.
KINDS = ("int8-weights", "int4-weights", "int8", "fp8")
KEPT, OTHER = "kept", "other"


@dataclass(frozen=True)
class Cell:
    """One layer: its place in the grid, the kind that gives its colour, and the text on hovering."""

    column: int
    row: int
    kind: str
    title: str


@dataclass(frozen=True)
class Grid:
    """The layers of one list of blocks, or those outside of blocks."""

    title: str
    rows: list[str]
    columns: list[int]
    cells: list[Cell]

    @property
    def cell(self) -> float:
        return min(CELL, CELLS / len(self.columns))

    @property
    def width(self) -> float:
        return LABEL + 8 + self.cell * len(self.columns)

    @property
    def height(self) -> int:
        return ROW * (len(self.rows) + 1) + 4

    @property
    def ticks(self) -> list[tuple[int, int]]:
        """Each place of a number of a block, and the number; at most twelve."""
        step = -(-len(self.columns) // 12)
        return [(place, number) for place, number in enumerate(self.columns) if place % step == 0]


@dataclass(frozen=True)
class Precisions:
    """The grids of one part, and how many layers have each precision."""

    part: str
    grids: list[Grid]
    counts: list[tuple[str, str, int]]


def precisions(components: Iterable[Component]) -> list[Precisions]:
    """Return the plots of the parts whose linears were quantized."""
    found = []
    for component in components:
        layers = component.techniques.get("quantize", {}).get("layers")
        if layers:
            counts = Counter((_kind(layer), layer.get("precision") or KEPT) for layer in layers.values())
            listed = [(kind, name, count) for (kind, name), count in counts.most_common()]
            found.append(Precisions(component.name, _grids(layers), listed))
    return found


def _grids(layers: Mapping[str, Mapping[str, Any]]) -> list[Grid]:
    """Return a grid for each list of blocks, and one for the other layers, in the order of the model."""
    by_list: dict[str, dict[str, tuple[int, str]]] = {}
    for name in layers:
        match = _IN_LIST.fullmatch(name)
        blocks, place = (match[1], (int(match[2]), match[3])) if match else ("", (0, name))
        by_list.setdefault(blocks, {})[name] = place
    # The layers outside of blocks are named last: a reader looks for the blocks.
    ordered = sorted(by_list.items(), key=lambda pair: not pair[0])
    return [_grid(blocks, places, layers) for blocks, places in ordered]


def _grid(blocks: str, places: Mapping[str, tuple[int, str]], layers: Mapping[str, Mapping[str, Any]]) -> Grid:
    columns = sorted({number for number, _ in places.values()})
    rows = list(dict.fromkeys(layer for _, layer in places.values()))
    cells = [
        Cell(columns.index(number), rows.index(layer), _kind(layers[name]), _title(name, layers[name]))
        for name, (number, layer) in places.items()
    ]
    return Grid(blocks or "outside of the blocks", rows, columns if blocks else [0], cells)


def _kind(layer: Mapping[str, Any]) -> str:
    precision = layer.get("precision")
    if precision is None:
        return KEPT
    return next((kind for kind in KINDS if str(precision).startswith(kind)), OTHER)


def _title(name: str, layer: Mapping[str, Any]) -> str:
    if layer.get("precision") is None:
        return f"{name}: unchanged, {layer.get('reason') or 'without a reason'}"
    provider = f", computed by {layer['provider']}" if layer.get("provider") else ""
    ratio = f", SQNR {layer['sqnr']:.1f} dB" if layer.get("sqnr") is not None else ""
    return f"{name}: {layer['precision']}{provider}{ratio}"
