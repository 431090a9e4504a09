"""`tritium verify`: compare eager and accelerated images with thresholds."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from tritium.bench import verify
from tritium.bench.generation import EXAMPLE, jobs_for, load
from tritium.bench.settings import quantized
from tritium.bench.verify import Thresholds, Verified
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.cli.table import console
from tritium.errors import ConfigError
from tritium.pipelines import recipe as recipes
from tritium.pipelines.plan import Plan
from tritium.pipelines.recipe import Recipe
from tritium.quality import Difference

# For pipelines without default prompts.
_PROMPT = "a photo of a cat"


def command(
    model: Annotated[
        str, typer.Option(metavar="example|DIR", help="The pipeline that ships with Tritium, or a diffusers folder.")
    ] = EXAMPLE,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `tritium tune` chose; without it, the defaults.")
    ] = None,
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="Use a recipe although it was measured for something else.")
    ] = False,
    quantize: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Quantize linears: fp8, int8, int8-weights, ..., or JSON.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What to generate; may be given several times.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="WxH", help="Multiples of 16; may be given several times.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; without it, the pipeline's own number.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="May be given several times; 0 if not at all.")] = None,
    min_psnr: Annotated[
        float | None,
        typer.Option(metavar="DB", help="inf asks for equal images; 40 by default, 33 with --quantize."),
    ] = None,
    min_ssim: Annotated[float | None, typer.Option(metavar="0..1", help="Structural similarity; equal is 1.")] = None,
    max_difference: Annotated[
        float | None, typer.Option(metavar="0..1", help="The largest difference of a pixel; white is 1 above black.")
    ] = None,
    max_latent_l2: Annotated[
        float | None, typer.Option(metavar="L", help="Relative L2 of the latents before decoding.")
    ] = None,
    max_lpips: Annotated[
        float | None, typer.Option(metavar="L", help="Needs the package lpips and its weights on this machine.")
    ] = None,
    locate: Annotated[
        bool, typer.Option("--locate", help="Also find the first module, fusion and provider outside of the bound.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
) -> None:
    """Generate the same images eagerly and accelerated, from the same seeds, and compare them.

    Every prompt is generated in every size with every seed. Exits with 1 if the worst image is past a threshold, with 2
    if the request is invalid, with 0 otherwise: made for continuous integration.
    """
    if quantize is not None and recipe is not None:
        raise ConfigError("a recipe has its own techniques: leave out --quantize or --recipe")
    # Read before the pipeline, which may take minutes.
    plan: Plan | Recipe | None = recipes.load(recipe) if recipe is not None else None
    if quantize is not None:
        plan = Plan(quantize=quantized(quantize))
    thresholds = Thresholds(
        min_psnr=min_psnr if min_psnr is not None else verify.default_psnr(plan),
        min_ssim=min_ssim,
        max_difference=max_difference,
        max_latent_l2=max_latent_l2,
        max_lpips=max_lpips,
    )
    if accept_differences and recipe is None:
        raise ConfigError("--accept-differences concerns recipes: give --recipe with it")
    prompts = prompt or ([_PROMPT] if model != EXAMPLE else None)
    jobs = jobs_for(model, prompts, size, steps, seed or [0])
    pipe = load(model, known_device(device_type))
    with progress.shown() as notify:
        verified = verify.verify(
            pipe, jobs, thresholds, notify, plan, accept_differences=accept_differences, find_cause=locate
        )
    if json:
        print(json_format.dumps({"model": model, **verified.to_dict()}, indent=2, allow_nan=False))
    else:
        show(verified)
    if not verified.passed:
        raise typer.Exit(1)


def show(verified: Verified) -> None:
    """Print a line per image, the worst of each figure, the verdict, and the located cause."""
    out = console()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt", overflow="ellipsis", no_wrap=True, max_width=40)
    with_lpips = any(row.difference.lpips is not None for row in verified.rows)
    for name in ("size", "seed", "PSNR dB", "SSIM", "largest", "latent L2", *["LPIPS"] * with_lpips):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")

    def add(what: tuple[str, str, str], found: Difference, *, past: bool) -> None:
        latents = "-" if found.latent_l2 is None else f"{found.latent_l2:.1e}"
        lpips = "-" if found.lpips is None else f"{found.lpips:.4f}"
        figures = (f"{found.psnr:.1f}", f"{found.ssim:.4f}", f"{found.largest:.1e}", latents, *[lpips] * with_lpips)
        table.add_row(*what, *figures, "[red]past[/]" if past else "")

    for row in verified.rows:
        what = (escape(row.job.prompt), f"{row.width}x{row.height}", str(row.job.seed))
        add(what, row.difference, past=bool(row.broken))
    table.add_section()
    add(("worst", "", ""), verified.worst, past=not verified.passed)
    out.print(table)
    ways = "; ".join(f"{name}: {choice}" for name, choice in verified.choices.items() if choice != "eager")
    asked = ", ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in verified.thresholds.given.items())
    lines = [f"accelerated: {escape(ways or 'nothing')}"]
    lines += [escape(note) for note in verified.notes]
    if verified.location is not None:
        lines.append(escape(f"located: {verified.location}"))
    lines.append(
        f"[green]passed[/]: {asked}" if verified.passed else f"[red]FAILED[/]: {escape('; '.join(verified.broken))}"
    )
    for line in lines:
        out.print(line, soft_wrap=True, highlight=False)
