"""`tritium bench families`: eager, torch.compile, `tritium.optimize` and the backend alone, interleaved in one process.

Time is checked before each variant is compiled. Past the family's own limit the optional variants are cut, past that of
the run the family is left to the next run. A variant that is cut or fails is named in the remark of the other rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium import compat, fidelity, measure
from tritium.api import Handle
from tritium.bench import variants
from tritium.bench.comparison import Comparison, call_of, release, tensor_of
from tritium.bench.denoisers import FAMILIES, FEW, Denoiser, find_families
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, REDUCE_OVERHEAD, TRITIUM
from tritium.bench.run import build
from tritium.bench.settings import Notify, Settings
from tritium.bench.store import Clock, Store
from tritium.bench.suite import Measured, Outcome, OutOfTimeError, Task, measure_all, missing
from tritium.bench.workload import Built

# Calls before a variant is measured: ordinary calls decide about a capture, several in a row without a wait.
SETTLING_TURNS = 3
SETTLING_CALLS = 8
SETTLING_SECONDS = 1.0

# Milliseconds of one turn: a long call is timed once, a short one several times in a row.
_TURN_MS = 60.0
_LONGEST_BURST = 5

# A family starts only if this share of its limit is left of the run's time.
_ENOUGH = 0.75

# Without these a row says nothing.
_NEEDED = (EAGER, INDUCTOR, OPTIMIZED)


def run(names: Sequence[str], settings: Settings, store: Store, clock: Clock, notify: Notify) -> Outcome:
    """Measure the named families again, or without names all that the store lacks, until the clock is at its end."""
    if names:
        return measure_all(tasks(find_families(names), settings), settings, store, clock, notify)
    known = find_families(FEW) if settings.small else FAMILIES
    return measure_all(missing(tasks(known, settings), settings, store), settings, store, clock, notify)


def tasks(families: Sequence[Denoiser], settings: Settings) -> list[Task]:
    def task(family: Denoiser) -> Task:
        return Task(family.name, _ENOUGH * family.budget, lambda *times: measure_family(family, settings, *times))

    return [task(family) for family in families]


def measure_family(family: Denoiser, settings: Settings, clock: Clock, notify: Notify) -> Measured:
    """Measure one family. An error of a variant, or of the family, does not end the run."""
    comparison: _FamilyComparison | None = None
    try:
        notify(f"{family.name}: building", 0.0)
        comparison = _FamilyComparison(family, build(family, settings), settings)
        return comparison.measure(clock, notify)
    except (OutOfTimeError, torch.AcceleratorError):
        raise
    except Exception as error:  # noqa: BLE001 - the other families are measured all the same
        return Measured([], [_line(error)])
    finally:
        for handle in comparison.handles.values() if comparison is not None else ():
            handle.remove()
        release()


class _FamilyComparison:
    """The variants of one family while they are alive."""

    def __init__(self, family: Denoiser, built: Built, settings: Settings) -> None:
        self.family, self.built, self.settings = family, built, settings
        self.comparison = Comparison(family.name, settings, built.note, built.shapes, built.shrunk)
        self.handles: dict[str, Handle] = {}
        self.failed: dict[str, str] = {}
        self.cut: list[str] = []
        self._bytes_before = measure.allocated_bytes(settings.device_type)
        self._slowest_ms = 0.0

    def measure(self, clock: Clock, notify: Notify) -> Measured:
        limit = clock.within(self.family.budget)
        names = self._variants()
        for index, variant in enumerate(names):
            if clock.left <= 0 and variant in _NEEDED:
                raise OutOfTimeError
            if limit.left <= 0 and variant not in _NEEDED:
                self.cut.append(variant)
                continue
            notify(f"{self.family.name}: first calls, {variant}", 0.7 * index / len(names))
            self._add(variant, notify)
        self._time(notify)
        self._set_remarks()
        return Measured(self.comparison.rows(), [f"{name} ({reason})" for name, reason in self.failed.items()])

    def _variants(self) -> list[str]:
        compiled = [INDUCTOR] * (INDUCTOR in self.settings.against)
        reduced = [REDUCE_OVERHEAD] * (self.family.reduce_overhead and self.settings.device_type == "cuda")
        return [EAGER, *compiled, OPTIMIZED, TRITIUM, *(reduced if compiled else [])]

    def _add(self, variant: str, notify: Notify) -> None:
        """Call a variant until it has settled, and compare it with eager."""
        held = measure.allocated_bytes(self.settings.device_type) - self._bytes_before
        try:
            added = self.comparison.add(variant, self._call(variant), settle=self._settle)
            result = self.comparison.result(variant)
            peak = self.comparison.peak_memory(variant)
        except Exception as error:
            # After an error of the device itself nothing in this process can be trusted.
            if variant == EAGER or isinstance(error, torch.AcceleratorError):
                raise
            self.comparison.variants.pop(variant, None)
            self.failed[variant] = _line(error)
            return
        if variant == EAGER:
            self._reference, self._exact = result, self._in_float64(notify)
        added.fields |= {
            # Memory that earlier variants hold does not count for this one.
            "peak_memory_bytes": peak - held if peak is not None else None,
            "relative_l2": measure.relative_l2(result, self._reference),
            "error_f64": fidelity.error(result, self._exact) if self._exact is not None else None,
        }

    def _call(self, variant: str) -> Callable[[], Any]:
        model: Any = self.built.model
        if variant == OPTIMIZED:
            model = variants.twin(model)
            self.handles[variant] = variants.optimized(model, self.settings)
        else:
            model = variants.compile_variant(model, variant, self.settings)
        return call_of(model, self.built.inputs)

    def _settle(self, call: Callable[[], Any]) -> None:
        start, stopwatch = time.perf_counter(), measure.stopwatch_for(self.settings.device_type)
        for _ in range(SETTLING_TURNS):
            # Without waiting in between, as a denoising loop calls: whether the device idles decides about captures.
            milliseconds = min(stopwatch(call, SETTLING_CALLS))
            if time.perf_counter() - start > SETTLING_SECONDS:
                break
        self._slowest_ms = max(self._slowest_ms, milliseconds)

    def _in_float64(self, notify: Notify) -> torch.Tensor | None:
        if not (self.settings.errors and self.family.fits_float64):
            return None
        notify(f"{self.family.name}: the same in float64", 0.1)
        with torch.inference_mode():
            return tensor_of(fidelity.in_float64(self.built.model, (), self.built.inputs), self.family.name)

    def _time(self, notify: Notify) -> None:
        turn: list[str] = []
        compiled = compat.dynamo.graphs_compiled()

        def attribute(name: str | None) -> None:
            """Count what was compiled since the last turn for the variant whose turn that was."""
            nonlocal compiled
            if turn:
                self.comparison.variants[turn.pop()].fields["recompiles"] += compat.dynamo.graphs_compiled() - compiled
            compiled = compat.dynamo.graphs_compiled()
            if name is not None:
                turn.append(name)

        burst = max(1, min(_LONGEST_BURST, round(_TURN_MS / max(self._slowest_ms, 1e-3))))
        self.comparison.time(notify, burst=burst, prepare=attribute)
        attribute(None)

    def _set_remarks(self) -> None:
        """Describe how `optimize` runs the module, and name variants without a row."""
        failed = [f"{variant} failed: {reason}" for variant, reason in self.failed.items()]
        absent = [*failed, *[f"cut for time: {', '.join(self.cut)}"] * bool(self.cut)]
        for name, variant in self.comparison.variants.items():
            parts = [part.what for part in self.handles[name].components] if name in self.handles else []
            variant.fields["remark"] = "; ".join([*parts, *absent]) or None


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
