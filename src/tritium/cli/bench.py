"""`tritium bench`: measure workloads against eager and torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from tritium import device, disk
from tritium.bench import layer_functions, workloads
from tritium.bench.comparison import release
from tritium.bench.results import Comparison, Results, compare
from tritium.bench.settings import MODES, Settings
from tritium.bench.store import Store
from tritium.cli import progress, suites, table
from tritium.cli.options import takes
from tritium.errors import ConfigError, nearest

_NAMES = ", ".join((*workloads.WORKLOADS, *layer_functions.NAMES))
_REGIMES = {"static": False, "dynamic": True}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tritium bench`."""

    against: Annotated[str, typer.Option(help="What to measure against, separated by commas.")] = "eager,inductor"
    mode: Annotated[str, typer.Option(help=f"Mode of all compiled variants: {', '.join(MODES)}.")] = "default"
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results there.")] = None
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.json", help="Exit with 1 if Tritium is over 5 % slower than in that file."),
    ] = None
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of timing for a workload: 10 by default, 3 in a suite.")
    ] = None
    device: Annotated[str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")] = None
    dtype: Annotated[str | None, typer.Option(help="By default float32 on a CPU and bfloat16 on a GPU.")] = None
    regime: Annotated[
        str | None, typer.Option(help="Only static or only dynamic sizes, of a workload that has both.")
    ] = None
    kernels: Annotated[bool, typer.Option("--kernels", help="Also profile each kernel (GPU).")] = False
    profile: Annotated[
        bool, typer.Option("--profile", help="Also sum the time in operators, and show the gain of fusion over eager.")
    ] = False
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Also measure captured graphs: Tritium's, and those of torch.compile.")
    ] = False
    errors: Annotated[
        bool, typer.Option("--errors", help="Also compare every variant with a run in float64, which may take long.")
    ] = False
    exact: Annotated[bool, typer.Option("--exact", help="Also measure Tritium with fidelity 'exact'.")] = False
    without: Annotated[
        str, typer.Option(metavar="OP,...", help="Also measure Tritium without the owned kernels of each of these ops.")
    ] = ""
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Also decode twelve sizes in a row: recompiles, and the cost of dynamic ones."),
    ] = False
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="First calls with empty compiler caches, or with existing ones.")
    ] = True
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help="Measure these of the families again; the others stay as they are.")
    ] = ""
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds for a suite on a GPU: 540. Run again for what is left.")
    ] = None

    def settings(self, default_seconds: float, **more: Any) -> Settings:
        if self.regime is not None and self.regime not in _REGIMES:
            raise ConfigError(f"there is no regime {self.regime!r}; {nearest(self.regime, _REGIMES)}")
        return Settings(
            against=_split(self.against),
            mode=self.mode,
            seconds=default_seconds if self.seconds is None else self.seconds,
            device_type=known_device(self.device),
            cold=self.cold,
            dynamic=None if self.regime is None else _REGIMES[self.regime],
            kernels=self.kernels,
            profile=self.profile,
            exact=self.exact,
            graphs=self.graphs,
            errors=self.errors,
            without=_split(self.without),
            dtype_name=self.dtype,
            **more,
        )

    def given(self) -> list[str]:
        """Name the options that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


@takes(Options)
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
    options: Options,
) -> None:
    """Measure workloads under eager, torch.compile and Tritium, interleaved in one process.

    A suite keeps the rows in FILE that were measured on this device with these versions, and measures the rest.
    """
    if set(names) & set(suites.SUITES):
        _measure_suite(names, options)
    else:
        _measure_workloads(names, options)


def _measure_suite(names: list[str], options: Options) -> None:
    valid = {"against", "json", "seconds", "device", "dtype", "errors", "cold", "only", "budget"}
    refused = [f"--{name}" for name in options.given() if name not in valid]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: not for {names[0]}, which is a suite; leave out what it does not take"
        )
    only = _split(options.only)
    suites.check(names, only)
    if options.json is not None:
        disk.check_writable(options.json, make_folder=True)
    settings = options.settings(suites.SECONDS)
    suites.measure(names[0], settings, options.json, only, options.budget or suites.BUDGET)


def _measure_workloads(names: list[str], options: Options) -> None:
    if options.only or options.budget is not None:
        raise ConfigError(f"--only and --budget concern suites ({', '.join(suites.SUITES)}), and {names[0]} is none")
    chosen = {name: workloads.measure_of(name, sizes=options.sizes) for name in names}
    # Load before measuring for an hour, so that an invalid file fails immediately.
    old = Results.load(options.compare) if options.compare is not None else None
    if options.json is not None:
        disk.check_writable(options.json, make_folder=True)
    store = Store(options.json, known_device(options.device), resume=False)
    settings = options.settings(10.0, on_rows=store.add)
    for name in names if settings.dynamic is not None else ():
        workloads.check_sizes(name, settings)
    failed = _measure(chosen, settings)
    results = store.results
    table.show(results)
    table.show_kernels(results)
    for line in table.gains(results):
        print(line)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    if failed or (old is not None and report_comparison(compare(old, results))):
        raise typer.Exit(1)


def _measure(chosen: Mapping[str, workloads.Measure], settings: Settings) -> dict[str, str]:
    """Run all workloads; return the reasons for failures by name. A single workload raises instead."""
    failed: dict[str, str] = {}
    with progress.shown() as notify:
        for name, measure in chosen.items():
            try:
                measure(settings, notify)
            except Exception as error:
                if len(chosen) == 1:
                    raise
                # Keep the rows of the other workloads.
                failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            release()
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
