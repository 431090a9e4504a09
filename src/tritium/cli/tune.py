"""`tritium tune`: measure the fastest choices on this machine, and store them.

For a pipeline: the ways its parts can run, stored as a recipe. Otherwise: the providers of ops, stored as a table that
compilations read.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from tritium import device, disk, ops
from tritium import tuning as tuned
from tritium.bench import generation, pipelines, recipes
from tritium.bench.settings import DTYPES
from tritium.budget import Budget
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.cli.table import console
from tritium.compiler.compile import compile_pinned
from tritium.errors import ConfigError, nearest
from tritium.ops import INDUCTOR
from tritium.pipelines.generation import Job
from tritium.pipelines.recipe import Recipe
from tritium.report.html import tried
from tritium.tuning import Key, Machine, Verdict, compare, tables

# The seeds of jobs that a recipe is verified on begin here.
HELD_OUT = 1000


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
    max_lpips: Annotated[
        float | None, typer.Option(help="A pipeline: the largest LPIPS, where its package and weights are installed.")
    ] = None,
    min_ssim: Annotated[float | None, typer.Option(metavar="0..1", help="A pipeline: the least SSIM.")] = None,
    max_latent_l2: Annotated[
        float | None, typer.Option(help="A pipeline: the largest relative error of the latents.")
    ] = None,
    quantile: Annotated[
        float | None, typer.Option(metavar="0..1", help="A pipeline: the share of jobs inside the budget [7/8].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A pipeline: generate about 20 images' worth instead of 90.")
    ] = False,
    skip: Annotated[bool, typer.Option("--skip/--no-skip", help="A pipeline: search for steps to skip.")] = True,
    count: Annotated[int | None, typer.Option("--jobs", min=1, help="A pipeline: jobs of the search [8].")] = None,
    held_out: Annotated[
        int | None, typer.Option(min=0, help="A pipeline: jobs that the recipe is verified on [4].")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A pipeline: also write what was tried as a page.")
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
        output = output or Path("recipe.json")
        limits = {"min_psnr": min_psnr, "max_lpips": max_lpips, "min_ssim": min_ssim, "max_latent_l2": max_latent_l2}
        jobs = _jobs(names[0], prompts, sizes, steps, count or (4 if quick else 8), 0)
        search = recipes.Search(
            budget=_budget({name: value for name, value in limits.items() if value is not None}, quantile),
            seconds=seconds,
            held_out=tuple(
                _jobs(
                    names[0], prompts, sizes, steps, held_out if held_out is not None else 2 if quick else 4, HELD_OUT
                )
            ),
            quick=quick,
            skip=skip,
            state=output.with_name(f"{output.name}.partial"),
        )
        _tune_pipeline(names[0], jobs, search, output, known_device(device_type), html, json=json)
        return
    given = {"--output": output, "--min-psnr": min_psnr, "--prompt": prompts, "--size": sizes, "--steps": steps}
    given |= {"--max-lpips": max_lpips, "--min-ssim": min_ssim, "--max-latent-l2": max_latent_l2, "--html": html}
    given |= {"--quantile": quantile, "--quick": quick or None, "--jobs": count, "--held-out": held_out}
    superfluous = [option for option, value in given.items() if value is not None]
    if superfluous:
        if names and names[0] not in ops.catalog():
            # Other options show that a pipeline was meant.
            generation.check_model(names[0])
        raise ConfigError(
            f"{', '.join(superfluous)}: for pipelines alone, and none was named; add 'example' or a folder"
        )
    chosen = names or []
    _check_ops(chosen)
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
    if disturbed < len(verdicts):
        typer.echo(f"kept in {path}", err=json)
    if disturbed:
        typer.echo(
            f"{disturbed} of {len(verdicts)} were NOT kept: other processes took cores while they were measured; run again",
            err=json,
        )
        raise typer.Exit(1)


def _check_ops(chosen: Sequence[str]) -> None:
    able = [name for name, op in ops.catalog().items() if op.trial is not None and op.trial.standard]
    for name in chosen:
        if name not in ops.catalog():
            hint = nearest(name, ops.catalog())
            raise ConfigError(f"there is no op {name!r}, and no folder of that name holds a pipeline; {hint}")
        if name not in able:
            raise ConfigError(f"op {name!r} has nothing to compare; ops that have: {', '.join(able)}")


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


def _budget(limits: dict[str, float], quantile: float | None) -> Budget:
    """Return the budget of the options, or the default one without a limit."""
    fields = limits or recipes.DEFAULT.limits()
    return Budget(**fields) if quantile is None else Budget(**fields, quantile=quantile)


def _jobs(
    model: str, prompts: Sequence[str] | None, sizes: list[str] | None, steps: int | None, count: int, seed: int
) -> list[Job]:
    """Return so many jobs at least, with prompts and sizes in turn, each with another seed."""
    every = generation.jobs_for(model, prompts, sizes, steps)
    number = max(count, len(prompts or ()) * len(sizes or (1,))) if count else 0
    return [dataclasses.replace(every[place % len(every)], seed=seed + place) for place in range(number)]


def _tune_pipeline(
    model: str, jobs: list[Job], search: recipes.Search, output: Path, where: str, html: Path | None, *, json: bool
) -> None:
    for path in (output, *([] if html is None else [html])):
        disk.check_writable(path, make_folder=True)
    try:
        with progress.shown() as notify:
            notify(f"loading {model}", 0.0)
            pipe = generation.load(model, where)
            recipe = recipes.tune(pipe, jobs, search, notify)
    except KeyboardInterrupt:
        typer.echo(f"stopped; results so far are in {search.state}, and the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    recipe.save(output)
    if search.state is not None:
        search.state.unlink(missing_ok=True)
    if html is not None:
        disk.write(html, tried.page(recipe.to_dict(), f"Recipe for {model}"))
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
    _print_tried(recipe.figures["tried"])
    images, found = recipe.figures["images"], recipe.figures["difference"]
    psnr = "equal to eager" if found["psnr"] is None else f"PSNR {found['psnr']:.1f} dB"
    print(
        f"an image: {images['eager']['seconds']:.2f} s eager, {images['recipe']['seconds']:.2f} s with the recipe "
        f"({images['ratio']:.2f} times as fast); worst of {len(recipe.figures['jobs'])} jobs: {psnr}, SSIM {found['ssim']:.4f}"
    )
    if images["ratio_to_compile"] is not None:
        print(
            f"torch.compile: {images['torch.compile']['seconds']:.2f} s, {images['ratio_to_compile']:.2f} times slower"
        )
    if recipe.figures["held_out"]:
        worst = min(row["psnr"] or float("inf") for row in recipe.figures["held_out"])
        print(f"on {len(recipe.figures['held_out'])} held-out jobs: PSNR {worst:.1f} dB at least")
    if recipe.figures["skip"]["declined"]:
        print(f"no step is skipped: {recipe.figures['skip']['declined']}")
    elif recipe.figures["skip"].get("runs") is None:
        print("no step is skipped: no table kept the budget")


def _print_tried(rows: Sequence[dict[str, Any]]) -> None:
    """Print the ways that were tried on all jobs, the fastest first."""
    table = Table(title="tried", box=box.SIMPLE_HEAD)
    for name in ("way", "speed", "PSNR", "kept", "why"):
        table.add_column(name, justify="right" if name in ("speed", "PSNR") else "left")
    for row in sorted(rows, key=lambda row: -row["speed"]):
        if "another candidate" not in row["why"]:
            psnr = "equal" if row["psnr"]["median"] is None else f"{row['psnr']['median']:.1f}"
            table.add_row(row["name"], f"{row['speed']:.2f}x", psnr, "yes" if row["kept"] else "", row["why"])
    console().print(table)


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
    if not verdicts:
        print(f"nothing was measured on {machine} yet: `tritium tune` does")
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
