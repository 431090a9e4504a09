"""`tritium run`: generate an image."""

from __future__ import annotations

import contextlib
import json as json_format
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tritium
from tritium import config, example
from tritium.bench import generation, images, pipelines
from tritium.bench.images import Panel
from tritium.bench.settings import quantized
from tritium.cli import progress, ranks
from tritium.cli.bench import known_device
from tritium.errors import ConfigError, TritiumError
from tritium.pipelines import recipe as recipes
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.plan import Plan
from tritium.pipelines.recipe import Recipe
from tritium.quality import Difference
from tritium.techniques import catalog
from tritium.techniques.memory.config import Memory
from tritium.techniques.parallel.config import Parallel


def command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; the example's first one if left out.")] = None,
    *,
    model: Annotated[str, typer.Option(metavar="DIR_OR_EXAMPLE", help="A diffusers folder, or 'example'.")] = "example",
    attach: Annotated[
        str | None, typer.Option(metavar="NAME", help="The pipeline that `tritium keep` keeps, instead of --model.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Multiples of 16; the pipeline's default if left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; the pipeline's default if left out.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same noise.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Eager, accelerated and their amplified difference side by side.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Generate without Tritium.")] = False,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `tritium tune` has written; or 'example', which ships.")
    ] = None,
    on_other: Annotated[
        str | None,
        typer.Option(
            metavar="run|error",
            help="With --recipe: at other steps, sizes or schedulers run every step, or stop [run].",
        ),
    ] = None,
    artifacts: Annotated[Path | None, typer.Option(metavar="FILE", help="What `Handle.save` has written.")] = None,
    accept_differences: Annotated[
        bool, typer.Option("--accept-differences", help="Use a recipe that was measured elsewhere.")
    ] = False,
    techniques: Annotated[
        list[str] | None,
        typer.Option("--technique", metavar="NAME[=VALUE]", help=f"As in Plan, several times: {', '.join(catalog())}."),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Quantize linears: fp8, int8, int8-weights, ..., or JSON.")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", metavar="BYTES", help="Keep within a budget of device memory: 16GB, 14.5GiB, or fit."),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(metavar="DEGREES", help="Run on several ranks: auto, or degrees such as cfg=2,ulysses=4."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks to start; the product of the degrees, or all GPUs.")
    ] = None,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print times and differences as JSON.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="The image to write.")] = Path("out.png"),
) -> None:
    """Generate an image. `--compare` also runs eagerly and shows both times and the difference."""
    of_recipe = {"--on-other": on_other, "--accept-differences": accept_differences or None}
    _check_options(
        eager=eager, recipe=recipe, others=(compare, artifacts), changes=(techniques, quantize, vram), **of_recipe
    )
    named = named_techniques(techniques or (), quantize, vram)
    shared = _shared(parallel, gpus, eager=eager, attach=attach, recipe=recipe, is_named="parallel" in named)
    if shared is not None:
        named["parallel"] = shared
    config.check_environment()
    if attach is not None and (model != generation.EXAMPLE or device_type is not None):
        raise ConfigError("--attach has its own pipeline on the keeper's device: leave out --model and --device")
    source = model if attach is None else f"keeper {attach}"
    if not prompt and source != generation.EXAMPLE:
        raise ConfigError(f"{f'model {model!r}' if attach is None else source} needs a prompt")
    (job,) = generation.jobs_for(
        source, [prompt or example.PROMPTS[0]], None if size is None else [size], steps, [seed]
    )
    settings = Plan(progress=not json, **named)
    where = known_device(device_type)
    _check_files(output, artifacts)
    measured = _recipe(recipe, on_other)
    is_first = ranks.joined(shared, gpus, where) if shared is not None or ranks.launched() else True
    settings = settings.with_(progress=settings.progress and is_first)
    with _short_of_memory(size), progress.shown(is_first=is_first) as notify:
        notify(f"loading {source}", 0.0)
        pipe = generation.load(model, where, on_host=vram is not None) if attach is None else _attached(attach)
        if eager:
            notify("generating eagerly", 0.2)
            plain = generate(pipe, job)
            images.save(plain.pixels[0], output)
            _tell({"output": str(output), "seconds": {"eager": plain.seconds}}, json=json)
            return
        notify("first accelerated image, with compilation", 0.2)
        if measured is not None:
            settings = measured.plan_for(pipe, accept_differences=accept_differences).with_(progress=settings.progress)
        with tritium.optimize(pipe, settings, artifacts=artifacts) as handle:
            first = generate(pipe, job)
            compared = None
            if compare:
                notify("generating eagerly and accelerated, alternately", 0.7)
                compared = pipelines.compare(pipe, handle, job, once=shared is not None)
            summary = str(handle) if shared is None else f"{handle}\n{handle.parallel}"
    if not is_first:
        return
    found: dict[str, Any] = {"output": str(output), "seconds": {"first": first.seconds}}
    if compared is None:
        images.save(first.pixels[0], output)
    else:
        plain, ours = compared
        difference = ours.difference(plain)
        found["seconds"] |= {"eager": plain.seconds, "tritium": ours.seconds}
        found["difference"] = difference.to_dict()
        summary += f"\n{difference}"
        images.save_sheet(panels(plain, ours, difference, job), output)
    _tell(found, json=json, summary=summary)


def _check_options(
    *, eager: bool, recipe: Path | None, others: Sequence[Any], changes: Sequence[Any], **of_recipe: Any
) -> None:
    if eager and any((*others, recipe, *changes)):
        raise ConfigError(
            "--eager runs without Tritium: leave out --compare, --recipe, --artifacts, --technique, --quantize and --vram"
        )
    if recipe and any(changes):
        raise ConfigError("a recipe has its own techniques: leave out --technique, --quantize and --vram, or --recipe")
    for option, value in of_recipe.items():
        if value is not None and recipe is None:
            raise ConfigError(f"{option} concerns a recipe: name one with --recipe")


def _check_files(output: Path, artifacts: Path | None) -> None:
    if artifacts is not None and not artifacts.is_file():
        raise ConfigError(f"--artifacts: there is no file {artifacts}; `handle.save(path)` writes one")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}; create it first, or write elsewhere")
    images.check_writable(output)


def _attached(name: str) -> Any:
    pipe = tritium.attach(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _shared(
    parallel: str | None, gpus: int | None, *, eager: bool, attach: str | None, recipe: Path | None, is_named: bool
) -> Parallel | None:
    """Return how the image is shared between ranks, or None; ranks of another launcher share it by default."""
    if parallel is None:
        if gpus is not None:
            raise ConfigError("--gpus is the number of ranks of --parallel: name it, such as --parallel auto")
        is_shared = ranks.launched() and recipe is None and not eager and not is_named
        return Parallel() if is_shared else None
    for option, is_given in (
        ("--eager", eager), ("--attach", attach), ("--recipe", recipe), ("--technique parallel=...", is_named)
    ):  # fmt: skip
        if is_given:
            raise ConfigError(f"--parallel cannot be combined with {option}; leave one of them out")
    return ranks.parallel_of(parallel)


def _recipe(path: Path | None, on_other: str | None) -> Recipe | None:
    if path is None:
        return None
    found = recipes.load(path)
    return found if on_other is None else found.with_on_other(on_other)  # type: ignore[arg-type]  # checked by Skip


def named_techniques(options: Iterable[str], quantize: str | None = None, vram: str | None = None) -> dict[str, Any]:
    """Return keyword arguments of `Plan` from options `name` or `name=value`; a value may be JSON.

    `quantize` and `vram` are the values of `--quantize` and `--vram`.

    >>> named_techniques(["channels_last", "graphs=off", 'sparse={"latent": [1, 8, 8]}'])
    {'channels_last': True, 'graphs': 'off', 'sparse': {'latent': [1, 8, 8]}}
    """
    found: dict[str, Any] = {}
    for option in options:
        name, has_value, value = option.partition("=")
        try:
            found[name] = json_format.loads(value) if has_value else True
        except ValueError:
            found[name] = value
    values: dict[str, tuple[str, Any]] = {
        "quantize": ("--quantize", quantized(quantize) if quantize is not None else None),
        "memory": ("--vram", Memory(vram) if vram is not None else None),
    }
    for technique, (flag, setting) in values.items():
        if setting is not None:
            if technique in found:
                raise ConfigError(f"{flag} and --technique {technique}=... are the same; leave one of them out")
            found[technique] = setting
    return found


@contextlib.contextmanager
def _short_of_memory(size: str | None) -> Iterator[None]:
    """Report a failed allocation as one line."""
    try:
        yield
    except TritiumError:
        # A `MemoryShortage` is a `MemoryError` too, and names its own cause and remedy.
        raise
    except (RuntimeError, MemoryError) as error:
        # On a CPU, torch raises a plain RuntimeError.
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise
        asked = f"--size {size}" if size is not None else "the default size"
        raise ConfigError(f"{asked} does not fit into memory: generate a smaller image, or free memory") from error


def panels(eager: Image, ours: Image, found: Difference, job: Job) -> list[Panel]:
    """Return the eager image, the accelerated one, and their difference."""
    seconds = f"{ours.seconds:.2f} s, {eager.seconds / ours.seconds:.2f} times as fast"
    figures = (f"PSNR {found.psnr:.1f} dB, SSIM {found.ssim:.4f}", f"largest {found.largest:.1e}")
    difference = images.amplified(ours.pixels[0], eager.pixels[0])
    return [
        Panel(eager.pixels[0], ("eager", f"{eager.seconds:.2f} s", job.prompt)),
        Panel(ours.pixels[0], ("Tritium", seconds, f"seed {job.seed}")),
        Panel(difference, (f"difference, {images.AMPLIFIED} times", *figures)),
    ]


def _tell(found: dict[str, Any], *, json: bool, summary: str = "") -> None:
    if json:
        print(json_format.dumps(found, indent=2))
        return
    if summary:
        print(summary)
    for name, seconds in found["seconds"].items():
        print(f"{name}: {seconds:.2f} s")
    print(f"wrote {found['output']}")
