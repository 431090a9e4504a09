"""Measure families: eager, torch.compile, `tritium.optimize` and the backend alone, interleaved in one process.

Time is checked before each side is compiled. Past the family's own limit the optional sides are cut, past that of the
run the family is left to the next run. A side that is cut or fails is named in the remark of the other rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tritium import compat, fidelity, measure
from tritium.api import Handle
from tritium.bench import sides
from tritium.bench.families import FAMILIES, FEW, find
from tritium.bench.families.family import Family
from tritium.bench.results import OURS, YARDSTICK, Row
from tritium.bench.run import EAGER, TREES, Notify, Settings, build, call_of, release, start_compiler, tensor_of
from tritium.bench.sides import OPTIMIZED
from tritium.bench.store import Clock, Store
from tritium.bench.workload import Built
from tritium.config import CompilationConfig

# Calls before a side is measured: ordinary calls decide about a capture, several in a row without a wait.
SETTLING_TURNS = 3
SETTLING_CALLS = 8
SETTLING_SECONDS = 1.0

# Milliseconds of one turn: a long call is timed once, a short one several times in a row.
_TURN_MS = 60.0
_LONGEST_BURST = 5

# A family starts only if this share of its limit is left of the run's time.
_ENOUGH = 0.75

# Without these a row says nothing.
_NEEDED = (EAGER, YARDSTICK, OPTIMIZED)


class _OutOfTimeError(Exception):
    """The run's time is over in the middle of a family."""


@dataclass
class Side:
    """One variant: its call, and the figures of its first calls."""

    call: Callable[[], Any]
    handle: Handle | None = None
    first_call_s: float = 0.0
    graphs: int = 0
    recompiles: int = 0
    peak_bytes: int | None = None
    milliseconds: float = 0.0
    relative_l2: float = 0.0
    error_f64: float | None = None

    @property
    def remark(self) -> str:
        """Describe how `optimize` runs the module; empty for the other sides."""
        return "" if self.handle is None else "; ".join(part.what for part in self.handle.components)


@dataclass(frozen=True)
class Outcome:
    """Families left to the next run, and the sides that failed."""

    left_over: list[str]
    failed: list[str]


def run(names: Sequence[str], settings: Settings, store: Store, clock: Clock, notify: Notify) -> Outcome:
    """Measure the named families again, or without names all that the store lacks, until the clock is at its end."""
    if names:
        return measure_all(find(names), settings, store, clock, notify)
    catalogue = find(FEW) if settings.device_type == "cpu" else FAMILIES
    dtype = _name_of(settings.dtype)
    return measure_all([f for f in catalogue if not store.has(f.name, dtype)], settings, store, clock, notify)


def measure_all(chosen: Sequence[Family], settings: Settings, store: Store, clock: Clock, notify: Notify) -> Outcome:
    """Measure families and store the rows of each as soon as they are known."""
    failed: list[str] = []
    if settings.cold and chosen:
        start_compiler(settings.device_type)
    for index, family in enumerate(chosen):
        if clock.left <= (_ENOUGH * family.budget if settings.device_type == "cuda" else 0):
            return Outcome([later.name for later in chosen[index:]], failed)

        def share(what: str, done: float, index: int = index) -> None:
            notify(what, (index + done) / len(chosen))

        try:
            rows, reasons = measure_family(family, settings, clock, share)
            store.add(rows)
        except _OutOfTimeError:
            return Outcome([later.name for later in chosen[index:]], failed)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - the other families are measured all the same
            reasons = [_line(error)]
        failed += [f"{family.name}: {reason}" for reason in reasons]
        release()
    return Outcome([], failed)


def measure_family(family: Family, settings: Settings, clock: Clock, notify: Notify) -> tuple[list[Row], list[str]]:
    """Return the rows of one family and the reasons of the sides that failed."""
    notify(f"{family.name}: building", 0.0)
    built = build(family, settings)
    base = sides.allocated(settings.device_type)
    measuring = _Measuring(family, built, settings, notify)
    variants, limit = _variants(family, settings), clock.within(family.budget)
    try:
        for index, variant in enumerate(variants):
            if clock.left <= 0 and variant in _NEEDED:
                raise _OutOfTimeError
            if limit.left <= 0 and variant not in _NEEDED:
                measuring.cut.append(variant)
                continue
            notify(f"{family.name}: first calls, {variant}", 0.8 * index / len(variants))
            measuring.add(variant, base)
        notify(f"{family.name}: timing {', '.join(measuring.sides)} in turns", 0.8)
        return measuring.rows(), [f"{name} ({reason})" for name, reason in measuring.failed.items()]
    finally:
        measuring.remove()


def _variants(family: Family, settings: Settings) -> list[str]:
    trees = [TREES] * (family.reduce_overhead and settings.device_type == "cuda" and YARDSTICK in settings.against)
    return [EAGER, *[YARDSTICK] * (YARDSTICK in settings.against), OPTIMIZED, OURS, *trees]


@dataclass
class _Measuring:
    """The sides of one family while they are alive."""

    family: Family
    built: Built
    settings: Settings
    notify: Notify
    sides: dict[str, Side] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    reference: torch.Tensor | None = None
    exact: torch.Tensor | None = None

    def add(self, variant: str, base: int) -> None:
        """Make a side, call it until it has settled, and compare it with eager."""
        before = sides.allocated(self.settings.device_type)
        try:
            side = self._make(variant)
            self._first_calls(side)
            result = tensor_of(side.call(), self.family.name)
            peak = measure.peak_memory(side.call, self.settings.device_type)
        except Exception as error:
            # After an error of the device itself nothing in this process can be trusted.
            if variant == EAGER or isinstance(error, torch.AcceleratorError):
                raise
            self.failed[variant] = _line(error)
            return
        # Memory that earlier sides hold does not count for this one.
        on_device = self.settings.device_type == "cuda"
        side.peak_bytes = peak - (before - base) if on_device and peak is not None else peak
        if variant == EAGER:
            self.reference = result
            self.exact = self._in_float64()
        assert self.reference is not None
        side.relative_l2 = measure.relative_l2(result, self.reference)
        side.error_f64 = None if self.exact is None else fidelity.error(result, self.exact)
        self.sides[variant] = side

    def _make(self, variant: str) -> Side:
        model: Any = self.built.model
        config = self.settings.config or CompilationConfig()
        if variant == OPTIMIZED:
            model = sides.twin(model)
            handle = sides.optimized(model, config)
            return Side(self._call(model), handle)
        if variant == YARDSTICK:
            model = torch.compile(model)
        if variant == TREES:
            model = torch.compile(model, mode="reduce-overhead")
        if variant == OURS:
            model = torch.compile(model, backend=sides.backend_alone(config))
        return Side(self._call(model))

    def _call(self, model: Any) -> Callable[[], Any]:
        return sides.without_gradients(call_of(model, self.built.inputs))

    def _first_calls(self, side: Side) -> None:
        settings = self.settings
        with sides.cold_caches(settings):
            before = compat.dynamo.graphs_compiled()
            side.first_call_s = measure.first_call(side.call, settings.device_type)
            side.graphs = compat.dynamo.graphs_compiled() - before
            before, start = compat.dynamo.graphs_compiled(), time.perf_counter()
            stopwatch = measure.stopwatch_for(settings.device_type)
            for _ in range(SETTLING_TURNS):
                # Without waiting in between, as a denoising loop calls: whether the device idles decides about captures.
                side.milliseconds = min(stopwatch(side.call, SETTLING_CALLS))
                if time.perf_counter() - start > SETTLING_SECONDS:
                    break
            side.recompiles = compat.dynamo.graphs_compiled() - before

    def _in_float64(self) -> torch.Tensor | None:
        if not (self.settings.errors and self.family.fits_float64):
            return None
        self.notify(f"{self.family.name}: the same in float64", 0.1)
        return tensor_of(fidelity.in_float64(self.built.model, (), self.built.inputs), self.family.name)

    def rows(self) -> list[Row]:
        """Time the sides, interleaved."""
        timings, load = self._timings()
        yardstick = timings.get(YARDSTICK)
        remark = self._remark()
        return [
            Row(
                workload=self.family.name,
                variant=variant,
                mode={TREES: "reduce-overhead", YARDSTICK: "default", OURS: "default"}.get(variant),
                dtype=_name_of(self.settings.dtype),
                shrunk=self.built.shrunk,
                note=self.built.note,
                shapes=self.built.shapes,
                **asdict(timings[variant]),
                ratio=yardstick.median_ms / timings[variant].median_ms if yardstick is not None else None,
                first_call_s=side.first_call_s,
                first_call_cold=self.settings.cold,
                peak_memory_bytes=side.peak_bytes,
                relative_l2=side.relative_l2,
                error_f64=side.error_f64,
                recompiles=side.recompiles,
                disturbed=load.disturbed if load is not None else None,
                remark="; ".join(filter(None, (side.remark, remark))) or None,
            )
            for variant, side in self.sides.items()
        ]

    def _timings(self) -> tuple[dict[str, measure.Timing], measure.Load | None]:
        slowest = max(side.milliseconds for side in self.sides.values())
        turn: list[str] = []
        compiled = compat.dynamo.graphs_compiled()

        def attribute(name: str | None) -> None:
            """Count what was compiled since the last turn for the side whose turn that was."""
            nonlocal compiled
            if turn:
                self.sides[turn.pop()].recompiles += compat.dynamo.graphs_compiled() - compiled
            compiled = compat.dynamo.graphs_compiled()
            if name is not None:
                turn.append(name)

        meter = measure.LoadMeter()
        timings = measure.interleave(
            {name: side.call for name, side in self.sides.items()},
            self.settings.device_type,
            seconds=self.settings.seconds,
            burst=max(1, min(_LONGEST_BURST, round(_TURN_MS / max(slowest, 1e-3)))),
            prepare=attribute,
        )
        attribute(None)
        return timings, meter.read()

    def _remark(self) -> str:
        failed = [f"{variant} failed: {reason}" for variant, reason in self.failed.items()]
        return "; ".join([*failed, *[f"cut for time: {', '.join(self.cut)}"] * bool(self.cut)])

    def remove(self) -> None:
        for side in self.sides.values():
            if side.handle is not None:
                side.handle.remove()


def with_few_tokens(family: Family) -> Family:
    """Take the full width with the small grid, where a float64 run fits whatever the family."""
    size = replace(
        family.full, grid=family.small.grid, text=family.small.text, note=f"{family.full.note}; few tokens of these"
    )
    return replace(family, name=f"{family.name} few tokens", full=size, tokens=0)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
