"""`tritium explain MODEL --parallel DEGREES --world N`: graphs and collectives of a model that is split over ranks."""

from __future__ import annotations

import json as json_format

from rich import box
from rich.table import Table

from tritium.bench import collectives
from tritium.bench.collectives import AFTER, Explained
from tritium.cli import progress
from tritium.cli.ranks import AUTO, parallel_of
from tritium.cli.table import console
from tritium.errors import ConfigError
from tritium.techniques.parallel.mesh import check


def command(name: str | None, parallel: str | None, world: int | None, *, json: bool) -> None:
    """Print what a split model exchanges; nothing is sent."""
    if name is None:
        raise ConfigError("explain --parallel needs a model, such as flux or wan")
    config = parallel_of(parallel or AUTO)
    if world is None and config.is_auto:
        raise ConfigError("--parallel auto needs a number of ranks: --world 4")
    ranks = world or config.size
    check(config, ranks)
    with progress.shown() as notify:
        notify(f"{name}: split over {ranks} ranks, on tensors without memory", 0.1)
        found = collectives.explain(name, config, ranks)
    if json:
        print(json_format.dumps(found.to_dict(), indent=2))
        return
    _show(found)


def _show(found: Explained) -> None:
    print(f"{found.model}, {found.size}: {found.config} on {found.world} ranks")
    print("; ".join(found.notes))
    for graph in found.graphs:
        end = f", ends at {graph.break_reason}" if graph.break_reason else ""
        print(f"graph {graph.graph}: {graph.function}, {graph.nodes} nodes{end}")
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("block", "collective", "result", "ranks", "MB sent", "us exposed"):
        table.add_column(column, justify="left" if column in ("block", "collective") else "right", no_wrap=True)
    for block, several in found.by_block.items():
        for place, one in enumerate(several):
            cells = (
                " x ".join(map(str, one.shape)),
                str(one.ranks),
                f"{one.bytes / 1e6:.1f}",
                f"{one.exposed * 1e6:.0f}",
            )
            table.add_row(block if place == 0 else "", one.name, *cells)
    console().print(table)
    names = ", ".join(f"{kind} {many} times" for kind, (_, many) in found.blocks.items())
    print(f"in the order of a call; the published model has {names or 'no repeated blocks'}")
    if AFTER in found.by_block:
        print(f"{AFTER}: the tokens are joined once")
    print(f"estimated: {found.estimate}")
    others = [one for one in found.best.ranked[:4] if one.degrees != found.estimate.degrees][:3]
    for other in others:
        print(f"  instead: {other}")
    print(
        f"nothing was run: {found.rates}. The exposed time is an upper bound: nothing is hidden between a start and its "
        "wait. Inductor moves starts up and waits down. On GPUs, q, k and v are exchanged at once below 4 MiB"
    )
