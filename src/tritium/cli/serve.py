"""`tritium serve`: a pipeline over HTTP, with OpenAI's image API."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tritium import config, device
from tritium.bench import generation
from tritium.cli.bench import known_device
from tritium.cli.ranks import parallel_of
from tritium.cli.run import named_techniques
from tritium.errors import ConfigError, MissingExtra, nearest
from tritium.pipelines import recipe
from tritium.pipelines.generation import MULTIPLE
from tritium.pipelines.plan import Plan
from tritium.serve.engine import Fidelity, Quality, Size
from tritium.serve.worker_settings import DEFAULT_RECIPE, WorkerSettings
from tritium.techniques.parallel.mesh import check

_QUALITIES = ("low", "medium", "high", "xhigh", "max")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def command(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="A diffusers folder, or 'example'.")],
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; the folder's name if left out.")
    ] = None,
    aliases: Annotated[
        list[str] | None, typer.Option("--alias", metavar="NAME", help="Another name for it, such as gpt-image-1.")
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="WxH", help="A size to compile for, several times; the first is the default."),
    ] = None,
    batches: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="A batch size to compile and measure, several times; 1 is always there."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of requests that name none.")] = None,
    frames: Annotated[
        list[int] | None, typer.Option("--frames", min=1, help="A number of frames of videos, several times.")
    ] = None,
    text_tokens: Annotated[
        int | None, typer.Option(min=1, help="max_sequence_length of all calls; the pipeline's if left out.")
    ] = None,
    recipes: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", metavar="[NAME=]FILE", help="What `tritium tune` wrote: by name, or for all requests."
        ),
    ] = None,
    qualities: Annotated[
        list[str] | None,
        typer.Option(
            "--quality", metavar="NAME=VALUE,...", help="OpenAI's low, medium, high, ...: steps, a fidelity, a recipe."
        ),
    ] = None,
    loras: Annotated[
        list[str] | None, typer.Option("--lora", metavar="NAME=FILE", help="A LoRA that requests may name.")
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of all LoRAs of a request together; the largest file's if left out."),
    ] = None,
    edits: Annotated[
        bool, typer.Option("--edits/--no-edits", help="Also edit images, where diffusers has pipelines for it.")
    ] = True,
    techniques: Annotated[
        list[str] | None, typer.Option("--technique", metavar="NAME[=VALUE]", help="As in Plan, several times.")
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compiled code: read if the file exists, else written.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Serve the stock pipeline, without Tritium.")] = False,
    measure_eager: Annotated[
        bool, typer.Option("--measure-eager", help="Time an eager image at the start, for the web page.")
    ] = False,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys that clients send, one a line; without it anyone may ask.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Images that may wait.")] = 64,
    queue_seconds: Annotated[float, typer.Option(min=0.001, help="Estimated seconds of work that may wait.")] = 600.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a request is cancelled.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds for running requests after SIGTERM.")] = 60.0,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    workers: Annotated[
        int, typer.Option("--gpus", min=1, help="Worker processes, each with a GPU of its own; on a CPU, processes.")
    ] = 1,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="auto|AXIS=N,...", help="The --gpus compute each batch together: as in Plan(parallel=...), cfg=2."
        ),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run workers as replicas of Ray Serve.")] = False,
    replicas: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="With --ray: the replicas between which it scales [1].")
    ] = None,
) -> None:
    """Serve a pipeline over HTTP, with OpenAI's image API and a page at `/`."""
    _require_extras()
    config.check_environment()
    generation.check_model(pipeline)
    # Ray's replicas may be on other machines.
    where = device_type or device.default() if ray else known_device(device_type)
    named = named_techniques(techniques or ())
    if parallel is not None:
        if "parallel" in named:
            raise ConfigError("--parallel and --technique parallel=... are the same; leave one of them out")
        named["parallel"] = parallel_of(parallel)
    # The worker builds the plan: a wrong value is named before a pipeline is loaded.
    Plan(**named)
    named_recipes = _files("--recipe", recipes or (), default=DEFAULT_RECIPE)
    settings = WorkerSettings(
        pipeline=pipeline,
        name=name or (pipeline if pipeline == generation.EXAMPLE else Path(pipeline).resolve().name),
        sizes=_sizes(sizes or ()),
        batches=tuple(batches or (1,)),
        steps=steps,
        frames=tuple(frames or ()),
        text_tokens=text_tokens,
        recipes=named_recipes,
        qualities=_qualities(qualities or (), named_recipes),
        loras=_files("--lora", loras or ()),
        lora_rank=lora_rank,
        edits=edits,
        artifacts=str(artifacts) if artifacts is not None else None,
        techniques=named,
        eager=eager,
        measure_eager=measure_eager,
        device=where,
    )
    _check_files(settings)
    _check(settings, workers, parallel, replicas, ray=ray)
    runner = _runner(settings, workers, replicas, parallel=parallel is not None, ray=ray)
    _serve(
        runner,
        listen_on=(host, port),
        limits={"length": queue, "seconds": queue_seconds},
        settings={
            "api_keys": _keys(api_key_file, host),
            "hosts": _LOOPBACK if host in _LOOPBACK else (),
            "aliases": dict.fromkeys(aliases or (), settings.name),
            "timeout": timeout,
            "drain_seconds": drain_seconds,
        },
    )


def _require_extras() -> None:
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "PIL"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingExtra(module, "serve", "tritium serve") from error


def _check(settings: WorkerSettings, workers: int, parallel: str | None, replicas: str | None, *, ray: bool) -> None:
    """Raise for options that contradict one another."""
    if settings.eager and (settings.recipes or settings.techniques or settings.artifacts):
        raise ConfigError("--eager serves without Tritium: leave out --recipe, --technique, --parallel and --artifacts")
    if settings.lora_rank is not None and not settings.loras:
        raise ConfigError("--lora-rank concerns LoRAs: name one with --lora")
    if replicas is not None and not ray:
        raise ConfigError("--replicas concerns Ray: add --ray, or use --gpus on one machine")
    if ray and (parallel is not None or workers > 1):
        raise ConfigError("with --ray each replica has one GPU: use --replicas and leave out --gpus and --parallel")
    if parallel is not None and workers == 1:
        raise ConfigError("--parallel needs several processes: say how many with --gpus")
    if parallel is not None:
        check(settings.techniques["parallel"], workers)
    if settings.device == "cuda" and not ray and workers > device.gpu_count():
        raise ConfigError(f"--gpus {workers}: this machine has {device.gpu_count()}")


def _check_files(settings: WorkerSettings) -> None:
    """Raise for files that cannot be read, before a pipeline is loaded."""
    for file in settings.recipes.values():
        recipe.load(Path(file))
    for name, file in settings.loras.items():
        if not Path(file).is_file():
            raise ConfigError(f"--lora {name}: there is no file {file}")


def _runner(settings: WorkerSettings, workers: int, replicas: str | None, *, parallel: bool, ray: bool) -> Any:
    if ray:
        from tritium.serve import ray_replicas

        gpus = 1.0 if settings.device == "cuda" else 0.0
        return ray_replicas.runner(settings, ray_replicas.Replicas.parse(replicas or "1", gpus))
    from tritium.serve.process import ProcessWorker
    from tritium.serve.runner import LocalRunner

    if parallel:
        return LocalRunner([ProcessWorker(settings, ranks=workers)])
    return LocalRunner([ProcessWorker(dataclasses.replace(settings, gpu=gpu)) for gpu in range(workers)])


def _serve(runner: Any, *, listen_on: tuple[str, int], limits: dict[str, Any], settings: dict[str, Any]) -> None:
    from tritium.serve import server
    from tritium.serve.app import build_app
    from tritium.serve.dispatch import Dispatcher
    from tritium.serve.queue import Limits
    from tritium.serve.settings import Settings

    options = Settings(**settings)
    listening = server.listen(*listen_on)
    app = build_app(Dispatcher(runner, Limits(**limits)), options)
    server.serve(app, listening, lambda text: typer.echo(f"tritium: {text}"))


def _sizes(texts: Iterable[str]) -> tuple[Size, ...]:
    found = []
    for text in texts:
        size = generation.width_and_height(text)
        if size is None or any(side == 0 or side % MULTIPLE for side in size):
            raise ConfigError(f"--size {text!r} is not WIDTHxHEIGHT in multiples of {MULTIPLE}, such as 1024x768")
        found.append(size)
    return tuple(dict.fromkeys(found))


def _files(option: str, texts: Sequence[str], default: str | None = None) -> dict[str, str]:
    """Return files by name, of options `NAME=FILE`; one without a name is the default.

    >>> _files("--recipe", ["fast=a.json", "b.json"], "default")
    {'fast': 'a.json', 'default': 'b.json'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, is_named, file = text.partition("=")
        if not is_named:
            if default is None:
                raise ConfigError(f"{option} {text!r} has no name: write NAME=FILE")
            name, file = default, text
        if not re.fullmatch(r"[\w.-]{1,64}", name) or not file:
            raise ConfigError(f"{option} {text!r}: a name has letters, digits, '.', '_' and '-', and a file follows")
        if name in found:
            raise ConfigError(f"{option}: {name!r} is given twice")
        found[name] = file
    return found


def _qualities(texts: Iterable[str], recipes: Iterable[str]) -> dict[str, Quality]:
    """Return what qualities stand for.

    >>> _qualities(["low=12,fast", "high=50,exact"], ())["low"]
    Quality(steps=12, fidelity='fast', recipe=None)
    """
    found = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in _QUALITIES:
            raise ConfigError(f"--quality {text!r}: {nearest(name, _QUALITIES)}")
        fields: dict[str, Any] = {}
        for value in values.split(","):
            is_fidelity = value in get_args(Fidelity)
            if not (is_fidelity or value in recipes or (value.isdecimal() and int(value) > 0)):
                known = ", ".join((*get_args(Fidelity), *recipes))
                raise ConfigError(f"--quality {text!r}: {value!r} is neither a number of steps nor one of {known}")
            kind = "fidelity" if is_fidelity else "recipe" if value in recipes else "steps"
            fields[kind] = int(value) if kind == "steps" else value
        found[name] = Quality(**fields)
    return found


def _keys(file: Path | None, host: str) -> tuple[str, ...]:
    """Return the keys of a file; warn if a server that others reach has none."""
    if file is None:
        if host not in _LOOPBACK:
            typer.echo(f"tritium: anyone who reaches {host} can use this server: see --api-key-file", err=True)
        return ()
    try:
        keys = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no keys: write one a line")
    return keys
