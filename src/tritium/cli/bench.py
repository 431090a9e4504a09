"""`tritium bench`: measure workloads, or a suite, against eager and torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tritium import device, disk
from tritium.bench import layer_functions, pipelines, summary, workloads
from tritium.bench.comparison import release
from tritium.bench.denoisers import find_families
from tritium.bench.results import TOLERANCE, Changes, Results, Store, compare
from tritium.bench.settings import MODES, Settings
from tritium.bench.suite import Clock
from tritium.bench.suites import SUITES
from tritium.cli import progress, table
from tritium.errors import ConfigError, brief, nearest

_NAMES = ", ".join((*workloads.WORKLOADS, *layer_functions.NAMES))
_REGIMES = {"static": False, "dynamic": True}

# Options that suites take, by parameter.
_OF_SUITES = {"names", "against", "json", "seconds", "device_type", "dtype_name", "errors", "cold", "only", "budget"}

# The suite of whole pipelines, and the further options that it takes.
PIPELINE = "pipeline"
_OF_PIPELINES = {"quantize", "skip"}

# Seconds for a suite on a GPU.
_BUDGET = 540.0


def command(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKLOAD",
            help=f"One or more of: {_NAMES}; 'example' or a folder: a whole pipeline. Or one suite: families, pipeline "
            "flux, compile-time flux, host.",
        ),
    ],
    *,
    against: Annotated[str, typer.Option(help="What to measure against, separated by commas.")] = "eager,inductor",
    mode: Annotated[str, typer.Option(help=f"Mode of all compiled variants: {', '.join(MODES)}.")] = "default",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results there.")] = None,
    compare_with: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="OLD.json", help="Exit with 1 if Tritium is over 5 % slower than in that file."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of timing for a workload: 10 by default, 3 in a suite.")
    ] = None,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    dtype_name: Annotated[
        str | None, typer.Option("--dtype", help="By default float32 on a CPU and bfloat16 on a GPU.")
    ] = None,
    regime: Annotated[
        str | None, typer.Option(help="Only static or only dynamic sizes, of a workload that has both.")
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also profile each kernel (GPU).")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also sum the time in operators, and show the gain of fusion over eager.")
    ] = False,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Also measure captured graphs: Tritium's, and those of torch.compile.")
    ] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="Also compare every variant with a run in float64, which may take long.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Also measure Tritium with fidelity 'exact'.")] = False,
    skip: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="`bench pipeline`: also measure skipped steps: letters, a recipe, or JSON."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Also measure quantized linears: fp8, int8, ..., or Quantize as JSON."),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Of a whole pipeline's images; its default if left out.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of a whole pipeline's images; its default if left out.")] = None,
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Also decode twelve sizes in a row: recompiles, and the cost of dynamic ones."),
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="First calls with empty compiler caches, or with existing ones.")
    ] = True,
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="Measure these of the families again; the others stay as they are.")
    ] = "",
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds for a suite on a GPU: 540. Run again for what is left.")
    ] = None,
) -> None:
    """Measure workloads under eager, torch.compile and Tritium, interleaved in one process.

    A suite keeps the rows in FILE that were measured on this device with these versions, and measures the rest.
    """
    suite = next((name for name in names if name in SUITES), None)
    families = _split(only)
    if suite is not None:
        _check_suite(context, suite, names, families)
    elif families or budget is not None:
        raise ConfigError(f"--only and --budget concern suites ({', '.join(SUITES)}), and {names[0]} is none")
    if regime is not None and regime not in _REGIMES:
        raise ConfigError(f"there is no regime {regime!r}; {nearest(regime, _REGIMES)}")
    dynamic = None if regime is None else _REGIMES[regime]
    measures = {}
    if skip is not None and suite != PIPELINE:
        raise ConfigError("--skip concerns whole pipelines: write `tritium bench pipeline flux --skip TABLE`")
    if (size is not None or steps is not None) and not all(map(pipelines.is_pipeline, names)):
        raise ConfigError("--size and --steps concern whole pipelines: 'example', or a folder")
    if suite is None:
        measures = {name: workloads.measure_of(name, sizes=sizes, dynamic=dynamic) for name in names}
    # Load before measuring for an hour, so that an invalid file fails immediately.
    old = Results.load(compare_with) if compare_with is not None else None
    if json is not None:
        disk.check_writable(json, make_folder=True)
    where = known_device(device_type)
    store = Store(json, where, resume=suite is not None)
    default_seconds = 10.0 if suite is None else 3.0
    settings = Settings(
        against=_split(against),
        mode=mode,
        seconds=default_seconds if seconds is None else seconds,
        device_type=where,
        cold=cold,
        dynamic=dynamic,
        kernels=kernels,
        profile=profile,
        exact=exact,
        graphs=graphs,
        errors=errors,
        dtype_name=dtype_name,
        quantize=quantize,
        skip=skip,
        size=size,
        steps=steps,
        # A suite stores the rows of a task itself.
        on_rows=store.add if suite is None else len,
    )
    if suite is not None:
        failed = _measure_suite(suite, settings, store, families, budget or _BUDGET)
    else:
        failed = _measure_workloads(measures, settings, store)
    if failed or (old is not None and report_changes(compare(old, store.results))):
        raise typer.Exit(1)


def _check_suite(context: typer.Context, suite: str, names: list[str], families: tuple[str, ...]) -> None:
    """Raise a `ConfigError` unless the names are one suite and its model, with options that suites take."""
    model, (first, *rest) = SUITES[suite].model, names
    if first != suite:
        raise ConfigError(f"{suite} is a suite, which is measured alone: write `tritium bench {suite}`")
    if model is None and rest:
        raise ConfigError(f"`tritium bench {suite}` takes no further workload, got {' '.join(rest)}; use --only NAME")
    if model is not None and rest != [model]:
        hint = f"; {nearest(rest[0], [model])}" if len(rest) == 1 else ""
        raise ConfigError(f"there is no suite {' '.join(names)!r}; write `tritium bench {suite} {model}`{hint}")
    refused = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in _OF_SUITES | (_OF_PIPELINES if suite == PIPELINE else set())
        and _is_typed(context, parameter.name or "")
    ]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for {suite}, which is a suite; leave out what it does not take")
    if families and suite != "families":
        raise ConfigError(f"--only names families, and {suite} has none")
    find_families(families)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _measure_suite(name: str, settings: Settings, store: Store, only: tuple[str, ...], budget: float) -> list[str]:
    """Run a suite and print its table; return what failed."""
    if store.replaced:
        typer.echo(f"tritium: {store.replaced}", err=True)
    with progress.shown() as notify:
        outcome = SUITES[name].run(settings, store, Clock(budget), notify, only)
    rows = store.results.rows
    table.show(store.results)
    for line in (
        *SUITES[name].summary(rows),
        *(f"OUTSIDE the fidelity 'close': {line}" for line in summary.outside_contract(rows)),
        *(f"FAILED {reason}" for reason in outcome.failed),
    ):
        print(line)
    if outcome.left_over:
        again = "run the same command again" if store.path else "give --json FILE, and run it again, or --only NAME"
        print(f"no time was left for {', '.join(outcome.left_over)}: {again}")
    return outcome.failed


def _measure_workloads(chosen: Mapping[str, workloads.Measure], settings: Settings, store: Store) -> list[str]:
    """Run all workloads and print their table; return what failed. A single workload raises instead."""
    failed = []
    with progress.shown() as notify:
        for name, measure in chosen.items():
            try:
                measure(settings, notify)
            except Exception as error:
                if len(chosen) == 1:
                    raise
                # Keep the rows of the other workloads.
                failed.append(f"{name}: {brief(error)}")
            release()
    results = store.results
    table.show(results)
    table.show_kernels(results)
    for line in (*table.gains(results), *(f"FAILED {reason}" for reason in failed)):
        print(line)
    return failed


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def known_device(name: str | None) -> str:
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not known here; valid: 'cpu', 'cuda'")
    if name == "cuda" and not device.cuda_available():
        raise ConfigError(
            "device 'cuda': this machine has no NVIDIA GPU that torch can use; `tritium doctor` says more"
        )
    return name or device.default()


def report_changes(changes: Changes) -> bool:
    """Print the changes between two results; return True for a regression."""
    for change in changes.rows:
        print(change)
    for name in changes.unmatched:
        print(f"not compared: {name}")
    for name in changes.disturbed:
        print(f"warning: other processes took cores while {name} was timed, then or now: measure it again")
    for change in changes.drift:
        print(f"warning: {change.variant} itself moved by {change.slower_by:+.1%}: the machine or torch changed")
    for change in changes.regressions:
        print(f"REGRESSION past {TOLERANCE:.0%}: {change}")
    if not changes.regressions:
        print(f"no regression past {TOLERANCE:.0%}")
    return bool(changes.regressions)
