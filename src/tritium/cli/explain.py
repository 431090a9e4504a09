"""`tritium explain`: compile a workload with Tritium and show what was done, or list the fusions."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

import tritium
from tritium import disk
from tritium import fusions as catalogue
from tritium.bench import collectives, generation, pipelines, workloads
from tritium.bench.collectives import AFTER, Explained
from tritium.bench.comparison import compiled
from tritium.bench.results import TRITIUM
from tritium.bench.settings import Settings
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.cli.ranks import AUTO, parallel_of
from tritium.cli.table import console
from tritium.config import CompilationConfig
from tritium.errors import ConfigError
from tritium.fusions import Fusion
from tritium.pipelines.generation import generate
from tritium.pipelines.plan import Plan
from tritium.report import Report
from tritium.techniques.parallel.mesh import check

_NAMES = ", ".join(workloads.WORKLOADS)


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help=f"One of: {_NAMES}; 'example' or a folder: a whole pipeline."),
    ] = None,
    fusions: Annotated[bool, typer.Option("--fusions", help="List every fusion instead; takes no workload.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="inductor, or eager: recognise and rewrite without generating code.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report, or the list, as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Measure every kernel and write the report there as one page."),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump", metavar="DIR", help="Write a folder for every generated kernel: source, benchmark, graph."
        ),
    ] = None,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    parallel: Annotated[
        str | None,
        typer.Option(metavar="DEGREES", help="Show the collectives of a model on ranks: auto, or such as ulysses=4."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="With --parallel: the ranks; needs none of them.")
    ] = None,
) -> None:
    """Compile a workload with Tritium and show what fused, what did not, and why; or list the fusions."""
    if parallel is not None or world is not None:
        given = {"--fusions": fusions or None, "--engine": engine, "--device": device_type, "--html": html}
        superfluous = [what for what, value in {**given, "--dump": dump}.items() if value is not None]
        if superfluous:
            raise ConfigError(f"--parallel runs nothing on a device: leave out {', '.join(superfluous)}")
        _explain_split(name, parallel, world, json=json)
        return
    if fusions:
        given = {"a workload": name, "--engine": engine, "--device": device_type, "--html": html, "--dump": dump}
        superfluous = [what for what, value in given.items() if value is not None]
        if superfluous:
            raise ConfigError(f"--fusions lists the catalogue and compiles nothing: leave out {', '.join(superfluous)}")
        _list_fusions(json=json)
    elif name is None:
        raise ConfigError(
            f"explain needs a workload, one of {_NAMES}, 'example' or a folder; or --fusions for the list of fusions"
        )
    else:
        _explain(name, engine, device_type, json=json, html=html, dump=dump)


def _explain(
    name: str, engine: str | None, device_type: str | None, *, json: bool, html: Path | None, dump: Path | None
) -> None:
    if html is not None:
        # Check before minutes of compiling.
        disk.check_writable(html)
    # Without the option the environment decides, as for a Backend; an unknown name raises a ConfigError.
    given: dict[str, Any] = {} if engine is None else {"engine": engine}
    config = CompilationConfig(**given)
    if dump is not None and config.engine == "eager":
        raise ConfigError("--dump writes generated kernels, and engine 'eager' generates none")
    if dump is not None:
        try:
            dump.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--dump {dump}: cannot be made: {error.strerror}") from error
    settings = Settings(device_type=known_device(device_type), config=config)
    explained = _of_pipeline if pipelines.is_pipeline(name) else _of_model
    headline, report = explained(name, settings, config, kernels=html is not None)
    if html is not None:
        report.to_html(html, title=headline)
    folders = report.dump(dump) if dump is not None else []
    if json:
        print(report.to_json())
        return
    print(f"{headline}\n\n{report}" if html is None else f"{headline}: report in {html}")
    if dump is not None:
        print(
            f"\n{len(folders)} kernels in {dump}; run benchmark.py in one of the folders to measure it, edited or not"
        )


def _of_pipeline(name: str, settings: Settings, config: CompilationConfig, *, kernels: bool) -> tuple[str, Report]:
    """Return a headline and the report over all components of a pipeline that generates one image."""
    job = generation.jobs_for(name)[0]
    with progress.shown() as notify:
        notify(f"loading {name}", 0.0)
        pipe = generation.load(name, settings.device_type)
        notify("first image, with compilation", 0.1)
        with tritium.optimize(pipe, Plan(config=config, progress=False)) as handle:
            generate(pipe, job)
            notify("another image", 0.8)
            generate(pipe, job)
            report = tritium.explain(handle, call=(lambda: generate(pipe, job)) if kernels else None)
    return f"{Path(name).name}: {type(pipe).__name__}, one image of {job.prompt!r}", report


def _of_model(name: str, settings: Settings, config: CompilationConfig, *, kernels: bool) -> tuple[str, Report]:
    """Return a headline and the report of one call of a workload's model."""
    workload, *others = workloads.find(name, (generation.EXAMPLE,))
    if others:
        raise ConfigError(f"{name} is {1 + len(others)} workloads; explain takes one model")
    with progress.shown() as notify:
        notify(f"{name}: building", 0.0)
        built = settings.build(workload)
        notify(f"{name}: compiling with engine {config.engine}", 0.2)
        model = compiled(built, TRITIUM, settings)
        with torch.inference_mode():
            model.call(**built.inputs)
            if kernels:
                notify(f"{name}: timing the kernels", 0.9)
            report = tritium.explain(model.parts[0], call=(lambda: model.call(**built.inputs)) if kernels else None)
    return f"{name}: {built.note}{' (shrunk for the CPU)' if built.shrunk else ''}", report


def _list_fusions(*, json: bool) -> None:
    described = [_describe(fusion) for fusion in catalogue.catalog().values()]
    if json:
        print(json_format.dumps(described, indent=2))
        return
    out = console()
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("fusion", "families", "op", "spellings"):
        table.add_column(column, no_wrap=True)
    table.add_column("what")
    for entry in described:
        spellings = "by structure" if entry["by_structure"] else str(len(entry["spellings"]))
        cells = (entry["name"], ", ".join(entry["families"]), entry["op"] or "-", spellings, entry["doc"])
        table.add_row(*map(escape, cells))
    out.print(table)


def _describe(fusion: Fusion) -> dict[str, Any]:
    return {
        "name": fusion.name,
        "families": list(fusion.families),
        "op": None if fusion.replacement is None else fusion.replacement.name,
        "spellings": [getattr(spelling, "__name__", str(spelling)) for spelling in fusion.spellings],
        "by_structure": fusion.find is not None,
        "region": fusion.region,
        "doc": fusion.doc.strip().partition("\n")[0],
    }


def _explain_split(name: str | None, parallel: str | None, world: int | None, *, json: bool) -> None:
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
    _show_split(found)


def _show_split(found: Explained) -> None:
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
        f"nothing was run: {collectives.NVLINK}. The exposed time is an upper bound: nothing is hidden between a start and its "
        "wait. Inductor moves starts up and waits down. On GPUs, q, k and v are exchanged at once below 4 MiB"
    )
