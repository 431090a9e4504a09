"""`tritium bench families`, `pipeline flux`, `compile-time flux`, `host`: suites that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tritium.bench import compile_time, families, flux_pipeline, host, summary
from tritium.bench.denoisers import find_families
from tritium.bench.results import Row
from tritium.bench.settings import Notify, Settings
from tritium.bench.store import Clock, Store
from tritium.bench.suite import Outcome
from tritium.cli import progress, table
from tritium.errors import ConfigError, nearest

# Seconds of interleaved timing for one workload, and for a whole run on a GPU.
SECONDS = 3.0
BUDGET = 540.0


@dataclass(frozen=True)
class Suite:
    """A suite: how it is measured and summed up, and the model that it takes, if any."""

    run: Callable[[Sequence[str], Settings, Store, Clock, Notify], Outcome]
    model: str | None = None
    summary: Callable[[Sequence[Row]], list[str]] | None = None


def _families_summary(rows: Sequence[Row]) -> list[str]:
    return [
        f"{name.strip('`')}: over torch.compile {against}; over eager {eager}"
        for name, against, eager in summary.families_summary(rows)
    ]


SUITES = {
    "families": Suite(families.run, summary=_families_summary),
    "pipeline": Suite(flux_pipeline.run, "flux"),
    "compile-time": Suite(compile_time.run, "flux", summary.compile_time_summary),
    "host": Suite(host.run),
}


def check(names: Sequence[str], only: Sequence[str]) -> None:
    """Raise a `ConfigError` unless the names are one suite and its model."""
    suite, *rest = names
    if suite not in SUITES:
        inner = next(name for name in rest if name in SUITES)
        raise ConfigError(f"{inner} is a suite, which is measured alone: write `tritium bench {inner}`")
    model = SUITES[suite].model
    if model is None and rest:
        raise ConfigError(f"`tritium bench {suite}` takes no further workload, got {' '.join(rest)}; use --only NAME")
    if model is not None and rest != [model]:
        hint = f"; {nearest(rest[0], [model])}" if len(rest) == 1 else ""
        raise ConfigError(f"there is no suite {' '.join(names)!r}; write `tritium bench {suite} {model}`{hint}")
    if only and suite != "families":
        raise ConfigError(f"--only names families, and {suite} has none")
    find_families(only)


def measure(name: str, settings: Settings, path: Path | None, only: Sequence[str], budget: float) -> None:
    """Run a suite and print its table; exit with 1 if a variant failed."""
    suite, store = SUITES[name], Store(path, settings.device_type)
    if store.replaced:
        typer.echo(f"tritium: {store.replaced}", err=True)
    with progress.shown() as notify:
        outcome = suite.run(only, settings, store, Clock(budget), notify)
    rows = store.results.rows
    table.show(store.results)
    for line in suite.summary(rows) if suite.summary is not None else ():
        print(line)
    for line in summary.outside_contract(rows):
        print(f"OUTSIDE the fidelity 'close': {line}")
    if outcome.left_over:
        resume = "run the same command again"
        again = resume if path is not None else "give --json FILE, and run it again, or --only NAME"
        print(f"no time was left for {', '.join(outcome.left_over)}: {again}")
    for reason in outcome.failed:
        print(f"FAILED {reason}")
    if outcome.failed:
        raise typer.Exit(1)
