"""`tritium bench families`: eager, torch.compile, `tritium.optimize` and the backend alone, interleaved in one process.

Time is checked before each variant is compiled. Past the family's own limit the optional variants are cut, past that of
the run the family is left to the next run. A variant that is cut or fails is named in the remark of the other rows.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritium import compat, fidelity, measure
from tritium.api import Handle
from tritium.bench import comparison, summary
from tritium.bench.comparison import Comparison, call_of, tensor_of
from tritium.bench.denoisers import FAMILIES, FEW, Denoiser
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, REDUCE_OVERHEAD, TRITIUM, Row
from tritium.bench.settings import Notify, Settings
from tritium.bench.suite import Clock, OutOfTimeError, Suite, Task
from tritium.bench.workload import Built
from tritium.errors import brief

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


def tasks(families: Sequence[Denoiser], settings: Settings, *, few: bool = False) -> list[Task]:
    return [
        Task(
            family.name,
            _ENOUGH * family.budget,
            functools.partial(measure_family, family, settings),
            default=not few or family.name in FEW,
        )
        for family in families
    ]


def measure_family(family: Denoiser, settings: Settings, clock: Clock, notify: Notify) -> list[Row]:
    notify(f"{family.name}: building", 0.0)
    # Other processes may build and compile at the same time, but not time.
    with measure.gpu_lock(settings.device_type, shared=True):
        built = settings.build(family)
    with contextlib.ExitStack() as handles:
        return _Family(family, built, settings, notify, handles).measure(clock)


class _Family:
    """The variants of one family while they are alive."""

    def __init__(
        self, family: Denoiser, built: Built, settings: Settings, notify: Notify, handles: contextlib.ExitStack
    ) -> None:
        self.family, self.built, self.settings, self.notify, self.handles = family, built, settings, notify, handles
        self.comparison = Comparison.of(family.name, built, settings, notify)
        self.handle: Handle | None = None
        # Variants without a row, with the reasons.
        self.absent: list[str] = []
        self._bytes_before = measure.allocated_bytes(settings.device_type)
        # Bytes that each variant's first call left allocated.
        self._own_bytes: dict[str, int] = {}
        self._slowest_ms = 0.0

    def measure(self, clock: Clock) -> list[Row]:
        limit, cut = clock.within(self.family.budget), []
        is_compared, is_cuda = INDUCTOR in self.settings.against, self.settings.device_type == "cuda"
        reduced = self.family.reduce_overhead and is_cuda and is_compared
        compared = (INDUCTOR, *[REDUCE_OVERHEAD] * reduced) if is_compared else ()
        for group in ((EAGER,), compared, (OPTIMIZED,), (TRITIUM,)):
            # Both modes of Inductor compile the same kernels: the second mode takes those of the first.
            with self.settings.caches():
                for variant in group:
                    if clock.left <= 0 and variant in _NEEDED:
                        raise OutOfTimeError
                    if limit.left <= 0 and variant not in _NEEDED:
                        cut.append(variant)
                        continue
                    self._attempt(variant, functools.partial(self._add, cold=variant == group[0]))
        with measure.gpu_lock(self.settings.device_type):
            for variant in list(self.comparison.variants):
                self._attempt(variant, self._compare)
            self._time()
        self.absent += [f"cut for time: {', '.join(cut)}"] * bool(cut)
        for name, measured in self.comparison.variants.items():
            parts = [part.what for part in self.handle.components] if self.handle and name == OPTIMIZED else []
            measured.fields["remark"] = "; ".join([*parts, *self.absent]) or None
        return self.comparison.rows()

    def _attempt(self, variant: str, run: Callable[[str], None]) -> None:
        try:
            run(variant)
        except Exception as error:
            if variant == EAGER or isinstance(error, torch.AcceleratorError):
                raise
            self.comparison.variants.pop(variant, None)
            self.absent.append(f"{variant} failed: {brief(error)}")

    def _add(self, variant: str, *, cold: bool) -> None:
        """Call a variant for the first time; `cold` False if the caches may have its code."""
        before = self._allocated()
        added = self.comparison.add(variant, self._call(variant), caches=contextlib.nullcontext())
        self._own_bytes[variant] = self._allocated() - before
        if not cold:
            added.fields["first_call_cold"] = False
        if variant == EAGER:
            with measure.gpu_lock(self.settings.device_type, shared=True):
                self._exact = self._in_float64()
                if self.settings.device_type == "cuda":
                    # Leave the memory to other processes.
                    torch.cuda.empty_cache()

    def _compare(self, variant: str) -> None:
        """Call a variant until it has settled, and compare it with eager."""
        # Memory that other variants hold does not count for this one.
        held = self._allocated() - self._own_bytes[variant]
        measured = self.comparison.variants[variant]
        self.comparison.settle(measured, self._settle)
        result = self.comparison.result(variant)
        peak = self.comparison.peak_memory(variant)
        if variant == EAGER:
            self._reference = result
        measured.fields |= {
            "peak_memory_bytes": peak - held if peak is not None else None,
            "relative_l2": measure.relative_l2(result, self._reference),
            "error_f64": fidelity.error(result, self._exact) if self._exact is not None else None,
        }

    def _allocated(self) -> int:
        """Return the bytes on the GPU beyond model and inputs."""
        return measure.allocated_bytes(self.settings.device_type) - self._bytes_before

    def _call(self, variant: str) -> Callable[[], Any]:
        model: Any = self.built.model
        if variant == OPTIMIZED:
            model = comparison.twin(model)
            self.handle = self.handles.enter_context(comparison.optimized(model, self.settings))
        else:
            model = comparison.compile_variant(model, variant, self.settings)
        return call_of(model, self.built.inputs)

    def _settle(self, call: Callable[[], Any]) -> None:
        start, stopwatch = time.perf_counter(), measure.stopwatch_for(self.settings.device_type)
        for _ in range(SETTLING_TURNS):
            # Without waiting in between, as a denoising loop calls: whether the device idles decides about captures.
            milliseconds = min(stopwatch(call, SETTLING_CALLS))
            if time.perf_counter() - start > SETTLING_SECONDS:
                break
        self._slowest_ms = max(self._slowest_ms, milliseconds)

    def _in_float64(self) -> torch.Tensor | None:
        if not (self.settings.errors and self.family.fits_float64):
            return None
        self.notify(f"{self.family.name}: the same in float64", 0.1)
        with torch.inference_mode():
            return tensor_of(fidelity.in_float64(self.built.model, (), self.built.inputs), self.family.name)

    def _time(self) -> None:
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
        self.comparison.time(burst=burst, prepare=attribute)
        attribute(None)


SUITE = Suite(
    lambda settings, _: tasks(FAMILIES, settings, few=settings.small),
    summary=lambda rows: [" | ".join(line) for line in summary.families_summary(rows)],
)
