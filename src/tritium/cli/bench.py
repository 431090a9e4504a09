"""`tritium bench`: measure workloads against eager and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tritium import device
from tritium.bench import decoder_sizes as many_sizes
from tritium.bench import generation, layer_functions, pipelines, run, workloads
from tritium.bench.decoders import Decoder
from tritium.bench.results import Comparison, Results, Row, compare
from tritium.bench.workload import Workload
from tritium.cli import progress, suites, table
from tritium.errors import ConfigError

_NAMES = ", ".join((*workloads.WORKLOADS, *layer_functions.NAMES))


def command(
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
    mode: Annotated[str, typer.Option(help=f"Mode of both compiled sides: {', '.join(run.MODES)}.")] = "default",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results there.")] = None,
    compare_with: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="OLD.json", help="Exit with 1 if Tritium is over 5 % slower than in that file."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds of timing for a workload: 10 by default, 3 in a suite."),
    ] = None,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="By default float32 on a CPU and bfloat16 on a GPU.")] = None,
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
    without: Annotated[
        str, typer.Option(metavar="OP,...", help="Also measure Tritium without the owned kernels of each of these ops.")
    ] = "",
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
    if set(names) & set(suites.SUITES):
        _refuse_in_suite(
            names[0],
            **{"--mode": mode != "default", "--compare": compare_with, "--regime": regime, "--kernels": kernels},
            **{"--profile": profile, "--graphs": graphs, "--exact": exact, "--without": without, "--sizes": sizes},
        )
        chosen_only = _split(only)
        suites.check(names, chosen_only)
        if json is not None:
            check_writable(json)
        asked = run.Settings(
            against=_split(against),
            seconds=suites.SECONDS if seconds is None else seconds,
            device_type=known_device(device_type),
            cold=cold,
            errors=errors,
            dtype_name=dtype,
        )
        suites.measure(names, asked, json, chosen_only, suites.BUDGET if budget is None else budget)
        return
    if only or budget is not None:
        raise ConfigError(f"--only and --budget concern suites ({', '.join(suites.SUITES)}), and {names[0]} is none")
    chosen = [_runner(name, sizes=sizes) for name in names]
    # Load before measuring for an hour, so that an invalid file fails immediately.
    old = Results.load(compare_with) if compare_with is not None else None
    if json is not None:
        check_writable(json)
    rows: dict[tuple[str, ...], Row] = {}

    def keep(measured: list[Row]) -> None:
        rows.update((row.key, row) for row in measured)
        if json is not None:
            # Save after every workload: an interrupted run keeps its rows.
            Results.now(list(rows.values()), settings.device_type).save(json)

    settings = run.Settings(
        against=_split(against),
        mode=mode,
        seconds=10.0 if seconds is None else seconds,
        device_type=known_device(device_type),
        cold=cold,
        regime=regime,
        kernels=kernels,
        profile=profile,
        exact=exact,
        graphs=graphs,
        errors=errors,
        without=_split(without),
        dtype_name=dtype,
        on_rows=keep,
    )
    for name in names if regime is not None else ():
        _check_regime(name, settings)
    failed = _measure_all(names, chosen, settings)
    results = Results.now(list(rows.values()), settings.device_type)
    table.show(results)
    table.show_kernels(results)
    for line in table.gains(results):
        print(line)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    if failed or (old is not None and report_comparison(compare(old, results))):
        raise typer.Exit(1)


def _measure_all(
    names: Sequence[str], chosen: Sequence[Callable[[run.Settings, run.Notify], run.Outcome]], settings: run.Settings
) -> dict[str, str]:
    """Run all workloads; return the reasons for failures by name. A single workload raises instead."""
    failed: dict[str, str] = {}
    with progress.shown() as notify:
        for name, measure in zip(names, chosen, strict=True):
            try:
                measure(settings, notify)
            except Exception as error:
                if len(chosen) == 1:
                    raise
                # Keep the rows of the other workloads.
                failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            run.release()
    return failed


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _refuse_in_suite(suite: str, **options: Any) -> None:
    refused = [name for name, value in options.items() if value]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for {suite}, which is a suite; leave out what it does not take")


def _runner(name: str, *, sizes: bool) -> Callable[[run.Settings, run.Notify], run.Outcome]:
    """Return the function that measures a workload; raise for an unknown one before measuring."""
    if pipelines.is_pipeline(name):
        return functools.partial(pipelines.run, name)
    if layer_functions.is_function(name):
        return functools.partial(layer_functions.run, name)
    found = workloads.find(name, (generation.EXAMPLE, *layer_functions.NAMES))
    if sizes and not any(isinstance(workload, Decoder) for workload in found):
        raise ConfigError(f"--sizes concerns decoders, and {name} is none")
    return functools.partial(_run_all, found, sizes=sizes)


def _check_regime(name: str, settings: run.Settings) -> None:
    """Raise for a workload without regimes before measuring."""
    if pipelines.is_pipeline(name) or layer_functions.is_function(name):
        raise ConfigError(f"--regime concerns models with static and dynamic sizes, and {name} is none")
    for workload in workloads.find(name):
        run.regimes_of(workload, settings)


def _run_all(chosen: Sequence[Workload], settings: run.Settings, notify: run.Notify, *, sizes: bool) -> run.Outcome:
    rows: list[Row] = []
    models: dict[str, Any] = {}
    for index, workload in enumerate(chosen):

        def share(what: str, done: float, index: int = index) -> None:
            notify(what, (index + done) / len(chosen))

        if rows:
            run.release()
        outcome = run.run(workload, settings, share)
        rows += outcome.rows
        models = outcome.models
        if sizes and isinstance(workload, Decoder):
            run.release()
            rows += many_sizes.run(workload, settings, notify).rows
    return run.Outcome(rows, models)


def known_device(name: str | None) -> str:
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not known here; valid: 'cpu', 'cuda'")
    if name == "cuda" and not device.cuda_available():
        raise ConfigError(
            "device 'cuda': this machine has no NVIDIA GPU that torch can use; `tritium doctor` says more"
        )
    return name or device.default()


def check_writable(path: Path) -> None:
    """Raise if a file cannot be written, before measuring for an hour."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.is_symlink() or path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def report_comparison(comparison: Comparison) -> bool:
    """Print the changes; return True for a regression."""
    limit = f"{comparison.tolerance:.0%}"
    for change in comparison.changes:
        print(change)
    for name in comparison.unmatched:
        print(f"not compared: {name}")
    for name in comparison.disturbed:
        print(f"warning: other processes took cores while {name} was timed, then or now: measure it again")
    for change in comparison.drift:
        print(f"warning: {change.variant} itself moved by {change.slower_by:+.1%}: the machine or torch changed")
    for change in comparison.regressions:
        print(f"REGRESSION past {limit}: {change}")
    if not comparison.regressions:
        print(f"no regression past {limit}")
    return bool(comparison.regressions)
