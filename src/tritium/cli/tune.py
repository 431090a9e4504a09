"""`tritium tune`: measure the fastest choices on this machine, and store them.

For a pipeline: the ways its parts can run, stored as a recipe. Otherwise: the providers of ops, stored as a table that
compilations read.
"""

from __future__ import annotations

import json as json_format
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from tritium import device, disk, ops
from tritium import tuning as tuned
from tritium.bench import generation, pipelines, recipes
from tritium.bench.settings import DTYPES
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.cli.table import console
from tritium.compiler.compile import compile_pinned
from tritium.errors import ConfigError, nearest
from tritium.ops import INDUCTOR
from tritium.pipelines.generation import Job
from tritium.pipelines.recipe import Recipe
from tritium.tuning import Key, Machine, Verdict, compare, tables


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PIPELINE | OP...", help="'example' or a folder; or ops to compare, all if none is named."
        ),
    ] = None,
    *,
    dtype: Annotated[str, typer.Option(help=f"One or more of {', '.join(DTYPES)}, separated by commas.")] = "",
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long the variants of a block take turns.")
    ] = compare.SECONDS,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FILE", help="The table to write, or with --show to print [one in the cache folder]."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; print the rows that are there.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="A pipeline: the recipe to write.")
    ] = None,
    min_psnr: Annotated[
        float | None, typer.Option(metavar="DB", help="A pipeline: the least PSNR of images against eager [40].")
    ] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A pipeline: a prompt; several times.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="WxH", help="A pipeline: a size of images; several times.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="A pipeline: denoising steps.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure the fastest choices on this machine, and store them.

    A pipeline ('example' or a diffusers folder): tries the choices for each part on real calls, keeps the fastest whose
    images stay within the budget, and writes a recipe for `tritium.optimize(pipe, "recipe.json")`.

    Ops: compares their kernels with Inductor's, inside compiled blocks, for the shapes of known models. Later
    compilations read the table and measure nothing.
    """
    if names and pipelines.is_pipeline(names[0]):
        if len(names) > 1 or dtype or to or show:
            raise ConfigError("tune takes one pipeline, or ops; --to, --show and --dtype concern ops")
        prompts = prompts or list(generation.prompts_of(names[0])[:2])
        jobs = generation.jobs_for(names[0], prompts, sizes, steps)
        budget = recipes.Budget(min_psnr=40.0 if min_psnr is None else min_psnr, seconds=seconds)
        _tune_pipeline(names[0], jobs, budget, output or Path("recipe.json"), known_device(device_type), json=json)
        return
    given = {"--output": output, "--min-psnr": min_psnr, "--prompt": prompts, "--size": sizes, "--steps": steps}
    superfluous = [option for option, value in given.items() if value is not None]
    if superfluous:
        if names and names[0] not in ops.catalog():
            # Other options show that a pipeline was meant.
            generation.check_model(names[0])
        raise ConfigError(f"{', '.join(superfluous)} concern a pipeline ('example' or a folder), and none was named")
    chosen = names or []
    able = [name for name, op in ops.catalog().items() if op.trial is not None and op.trial.standard]
    for name in chosen:
        if name not in ops.catalog():
            raise ConfigError(f"there is no op {name!r}; {nearest(name, ops.catalog())}")
        if name not in able:
            raise ConfigError(f"op {name!r} has nothing to compare; ops that have: {', '.join(able)}")
    where = known_device(device_type)
    machine = device.describe(where).name
    if show:
        _print(machine, _shown(machine, to), json=json)
        return
    dtypes = _dtypes(dtype or ("bfloat16" if where == "cuda" else "float32"))
    keys = compare.standard_keys(chosen, dtypes, where)
    if not keys:
        raise ConfigError(f"no op that was asked for has a kernel of its own on {machine}: there is nothing to compare")
    path = to or tables.user_folder() / Machine(machine).file_name
    with progress.shown() as notify:

        def tell(key: Key, index: int, count: int) -> None:
            notify(f"{key.op}, {key.shape}, {key.dtype}", index / count)

        verdicts = compare.measure_keys(keys, where, path, tell, compile_pinned, seconds)
    _print(machine, verdicts, json=json)
    disturbed = sum(compare.DISTURBED in verdict.remarks for verdict in verdicts)
    typer.echo(f"kept in {path}", err=json)
    if disturbed:
        typer.echo(
            f"{disturbed} of {len(verdicts)} were NOT kept: other processes took cores while they were measured; run again",
            err=json,
        )
        raise typer.Exit(1)


def _shown(machine: str, path: Path | None) -> list[Verdict]:
    """Return the rows that compilations use on a machine, or those of one file."""
    if path is None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tuned.forget()
            rows = tuned.known(Machine(machine))
        for warning in caught:
            typer.echo(str(warning.message), err=True)
        return rows
    table = tuned.load(path)
    if not path.exists():
        raise ConfigError(f"cannot show {path}: there is no such file; `tritium tune --to {path}` writes it")
    if table.damage is not None:
        raise ConfigError(f"cannot show {path}: {table.damage}; `tritium tune --to {path}` writes it again")
    return list(table.rows.values())


def _tune_pipeline(
    model: str, jobs: list[Job], budget: recipes.Budget, output: Path, where: str, *, json: bool
) -> None:
    disk.check_writable(output, make_folder=True)
    with progress.shown() as notify:
        notify(f"loading {model}", 0.0)
        pipe = generation.load(model, where)
        recipe = recipes.tune(pipe, jobs, budget, notify)
    recipe.save(output)
    if json:
        print(json_format.dumps(recipe.to_dict(), indent=2))
    else:
        _print_recipe(recipe)
    typer.echo(f"wrote {output}", err=json)


def _print_recipe(recipe: Recipe) -> None:
    table = Table(title=recipe.fingerprint.device, box=box.SIMPLE_HEAD)
    for name in ("part", "chosen", "why"):
        table.add_column(name)
    for name, choice in recipe.choices.items():
        table.add_row(
            name, str(choice), recipe.figures["parts"].get(name, {}).get("why", "not called, or nothing to compile")
        )
    console().print(table)
    images, found = recipe.figures["images"], recipe.figures["difference"]
    psnr = "equal to eager" if found["psnr"] is None else f"PSNR {found['psnr']:.1f} dB"
    print(
        f"an image: {images['eager']['seconds']:.2f} s eager, {images['recipe']['seconds']:.2f} s with the recipe "
        f"({images['ratio']:.2f} times as fast); {psnr}, SSIM {found['ssim']:.4f}"
    )


def _dtypes(text: str) -> list[torch.dtype]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in DTYPES:
            raise ConfigError(f"dtype {name!r} is not measured; {nearest(name, DTYPES)}")
    return [DTYPES[name] for name in found]


def _print(machine: str, verdicts: Sequence[Verdict], *, json: bool) -> None:
    """Print one line per key: the block, the host's share of it, the op alone, and the chosen provider."""
    if json:
        print(json_format.dumps({"device": machine, "rows": [verdict.to_dict() for verdict in verdicts]}, indent=2))
        return
    bandwidth = device.copy_bandwidth(device.Device("", machine))
    table = Table(title=machine, box=box.SIMPLE_HEAD)
    for name in ("op", "shape", "dtype", "chosen"):
        table.add_column(name)
    for name in ("block ms", "ratio", "host us", "alone us", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    for verdict in verdicts:
        order = [INDUCTOR, *verdict.owned] if verdict.in_block else list(verdict.owned)
        alone = [verdict.alone_us[name] for name in order if name in verdict.alone_us]
        table.add_row(
            verdict.key.op,
            verdict.key.shape,
            verdict.key.dtype,
            verdict.provider if verdict.owned else verdict.why(),
            " / ".join(f"{verdict.ms[name]:.3f}" for name in order),
            f"{verdict.ratio:.2f}x" if verdict.owned and verdict.in_block else "-",
            _host(verdict),
            " / ".join(f"{us:.1f}" for us in alone),
            " / ".join(f"{verdict.bytes / bandwidth / us * 1e6:.0%}" for us in alone) if bandwidth else "",
        )
    console().print(table)


def _host(verdict: Verdict) -> str:
    """Return the extra host microseconds of each owned provider; `~` marks estimates from launch counts."""
    if not verdict.in_block or not verdict.owned or not (verdict.issue_us or verdict.launches):
        return ""
    site = verdict.site()
    extra = [site.costs[name].host_us - site.costs[INDUCTOR].host_us for name in verdict.owned]
    mark = "" if site.host_source == "measured" else "~"
    return " / ".join(f"{mark}{us:+.1f}" for us in extra)
