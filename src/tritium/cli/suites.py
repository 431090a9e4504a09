"""`tritium bench families`, `pipeline flux`, `compile-time flux`, `host`: suites that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from tritium.bench import compile_time, flux_pipeline, host, run, summary
from tritium.bench.families import find, measuring
from tritium.bench.results import Row
from tritium.bench.store import Clock, Store
from tritium.cli import progress, table
from tritium.errors import ConfigError, nearest

# The model names that each suite takes; empty for suites without one.
SUITES: dict[str, tuple[str, ...]] = {"families": (), "pipeline": ("flux",), "compile-time": ("flux",), "host": ()}

# Seconds of interleaved timing for one workload, and for a whole run on a GPU.
SECONDS = 3.0
BUDGET = 540.0


def check(names: Sequence[str], only: Sequence[str]) -> None:
    """Raise a `ConfigError` unless the names are one suite and its model."""
    suite, *rest = names
    if suite not in SUITES:
        inner = next(name for name in rest if name in SUITES)
        raise ConfigError(f"{inner} is a suite, which is measured alone: write `tritium bench {inner}`")
    models = SUITES[suite]
    if not models and rest:
        raise ConfigError(f"`tritium bench {suite}` takes no further workload, got {' '.join(rest)}; use --only NAME")
    if models and (len(rest) != 1 or rest[0] not in models):
        wanted = f"`tritium bench {suite} {models[0]}`"
        hint = f"; {nearest(rest[0], models)}" if len(rest) == 1 else ""
        raise ConfigError(f"there is no suite {' '.join(names)!r}; write {wanted}{hint}")
    if only and suite != "families":
        raise ConfigError(f"--only names families, and {suite} has none")
    find(only)


def measure(
    names: Sequence[str], settings: run.Settings, path: Path | None, only: Sequence[str], budget: float
) -> None:
    """Run a suite and print its table; exit with 1 if a side failed."""
    suite = names[0]
    store, clock = Store(path, settings.device_type), Clock(budget)
    if store.replaced:
        typer.echo(f"tritium: {store.replaced}", err=True)
    with progress.shown() as notify:
        outcome = _STEPS[suite](settings, store, clock, notify, only)
    table.show(store.results)
    for line in _summary(suite, store.results.rows):
        print(line)
    for line in summary.outside_contract(store.results.rows):
        print(f"OUTSIDE the fidelity 'close': {line}")
    if outcome.left_over:
        again = (
            "run the same command again" if path is not None else "give --json FILE, and run it again, or --only NAME"
        )
        print(f"no time was left for {', '.join(outcome.left_over)}: {again}")
    for reason in outcome.failed:
        print(f"FAILED {reason}")
    if outcome.failed:
        raise typer.Exit(1)


def _families(
    settings: run.Settings, store: Store, clock: Clock, notify: run.Notify, only: Sequence[str]
) -> measuring.Outcome:
    return measuring.run(only, settings, store, clock, notify)


def _pipeline(
    settings: run.Settings, store: Store, clock: Clock, notify: run.Notify, only: Sequence[str]
) -> measuring.Outcome:
    del only
    return measuring.Outcome(flux_pipeline.run(settings, store, clock, notify), [])


def _compile_time(
    settings: run.Settings, store: Store, clock: Clock, notify: run.Notify, only: Sequence[str]
) -> measuring.Outcome:
    del only
    return measuring.Outcome(compile_time.run(settings, store, clock, notify), [])


def _host(
    settings: run.Settings, store: Store, clock: Clock, notify: run.Notify, only: Sequence[str]
) -> measuring.Outcome:
    del only, clock
    host.run(settings, store, notify)
    return measuring.Outcome([], [])


_Step = Callable[[run.Settings, Store, Clock, run.Notify, Sequence[str]], measuring.Outcome]
_STEPS: dict[str, _Step] = {
    "families": _families,
    "pipeline": _pipeline,
    "compile-time": _compile_time,
    "host": _host,
}


def _summary(suite: str, rows: Sequence[Row]) -> list[str]:
    if suite == "families":
        return [
            f"{name.strip('`')}: over torch.compile {against}; over eager {eager}"
            for name, against, eager in summary.families_summary(rows)
        ]
    return summary.compile_time_summary(rows) if suite == "compile-time" else []
