"""`tritium tune`: compare the providers of ops on this machine and keep the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tritium import device, ops, tuned
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.compiler import tune
from tritium.errors import ConfigError, nearest
from tritium.ops import INDUCTOR
from tritium.tuned import Key, Verdict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Ops to compare; all if none is named.")
    ] = None,
    *,
    dtype: Annotated[str, typer.Option(help=f"One or more of {', '.join(DTYPES)}, separated by commas.")] = "",
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long the variants of a block take turns.")
    ] = tune.SECONDS,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write the table there instead of the cache folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; print what is known.")] = False,
) -> None:
    """Compare the kernels of ops with Inductor's, inside compiled blocks, for the shapes that known models have.

    Compilations use the verdicts from then on. On a GPU they would measure what they need by themselves; on a CPU
    nothing is measured but here.
    """
    chosen = names or []
    for name in chosen:
        if name not in ops.catalog():
            raise ConfigError(f"there is no op {name!r}; {nearest(name, ops.catalog())}")
        if ops.catalog()[name].trial is None:
            able = [op.name for op in ops.catalog().values() if op.trial is not None]
            raise ConfigError(f"op {name!r} has nothing to compare; ops that have: {', '.join(able)}")
    where = known_device(device_type)
    machine = device.describe(where).name
    if show:
        print_table(machine, tuned.known(machine))
        return
    dtypes = _dtypes(dtype or ("bfloat16" if where == "cuda" else "float32"))
    keys = tune.standard_keys(chosen, dtypes, where)
    if not keys:
        raise ConfigError(f"no op that was asked for has a kernel of its own on {machine}: there is nothing to compare")
    path = to or tuned.user_folder() / tuned.file_name(machine)
    with progress.shown() as notify:

        def tell(key: Key, index: int, count: int) -> None:
            notify(f"{key.op}, {key.shape}, {key.dtype}", index / count)

        verdicts = tune.measure_keys(keys, where, path, tell, seconds)
    print_table(machine, verdicts)
    disturbed = sum(tune.DISTURBED in verdict.remarks for verdict in verdicts)
    print(f"kept in {path}")
    if disturbed:
        print(
            f"{disturbed} of {len(verdicts)} were NOT kept: other processes took cores while they were measured; run again"
        )
        raise typer.Exit(1)


def _dtypes(text: str) -> list[torch.dtype]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in DTYPES:
            raise ConfigError(f"dtype {name!r} is not measured; {nearest(name, DTYPES)}")
    return [DTYPES[name] for name in found]


def print_table(machine: str, verdicts: Sequence[Verdict]) -> None:
    """One line a key: the block, the op alone, and who is chosen."""
    bandwidth = device.copy_bandwidth(device.Device("", machine))
    table = Table(title=machine, box=box.SIMPLE_HEAD)
    for name in ("op", "shape", "dtype", "chosen"):
        table.add_column(name)
    for name in ("block ms", "ratio", "alone us", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    for verdict in verdicts:
        table.add_row(*_cells(verdict, bandwidth))
    console = Console()
    if not console.is_terminal:
        console.width = 150
    console.print(table)


def _cells(verdict: Verdict, bandwidth: float | None) -> list[str]:
    owned = [name for name in verdict.block_ms if name != INDUCTOR]
    order = [INDUCTOR, *owned]
    share = ""
    if bandwidth and verdict.alone_us:
        share = " / ".join(f"{verdict.bytes / bandwidth / us * 1e6:.0%}" for us in (verdict.alone_us[n] for n in order))
    return [
        verdict.key.op,
        verdict.key.shape,
        verdict.key.dtype,
        verdict.provider if owned else verdict.why(),
        " / ".join(f"{verdict.block_ms[name]:.3f}" for name in order),
        f"{verdict.ratio:.2f}x" if owned else "-",
        " / ".join(f"{verdict.alone_us[name]:.1f}" for name in order if name in verdict.alone_us),
        share,
    ]
