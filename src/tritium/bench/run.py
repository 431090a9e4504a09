"""Measure a workload under eager, plain torch.compile and Tritium, interleaved in one process.

All sides share one model. Dynamo keys compiled code on code object and backend, so wrapping a module twice gives two
independent compiled versions of the same weights.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from tritium import compat, device, fidelity, measure, ops
from tritium.bench.profile import fusion_gain, operator_time, profile
from tritium.bench.results import OURS, YARDSTICK, Row
from tritium.bench.workload import Built, Regime, Workload, label
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, TritiumError, nearest

EAGER = "eager"
EXACT = f"{OURS} exact"
# torch.compile with static sizes, measured in a dynamic regime.
STATIC = f"{YARDSTICK} static"
# Variants with captured graphs: Tritium's static graphs, and Inductor's CUDA graphs.
GRAPHS = f"{OURS} graphs"
TREES = f"{YARDSTICK} reduce-overhead"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Called with the current activity and the share of this workload that is done.
Notify = Callable[[str, float], None]

# The share of a workload's time before the timing starts: most of it is compilation.
PREPARED = 0.7

# Calls in one turn: the host issues the next call while the device computes this one, as in a denoising loop.
_BURST = {"cuda": 5}


def _silent(what: str, share: float) -> None:
    del what, share


def _not_kept(rows: list[Row]) -> None:
    del rows


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, the same for all sides."""

    against: tuple[str, ...] = (EAGER, YARDSTICK)
    mode: str = "default"
    seconds: float = 10.0
    device_type: str = "cpu"
    # Compile in an empty cache folder. Otherwise the second side would load kernels that the first one built.
    cold: bool = True
    config: CompilationConfig | None = None
    # `static` or `dynamic` sizes; all that a workload has if None.
    regime: str | None = None
    # Also profile the kernels of compiled variants.
    kernels: bool = False
    # Also sum the time in operators and kernels of every variant, which shows the gain of fusion.
    profile: bool = False
    # Also measure Tritium with fidelity `exact`, which shows the cost of bit-equality.
    exact: bool = False
    # Ops whose owned kernels are disabled, one variant for each op.
    without: tuple[str, ...] = ()
    # Also measure Tritium with static graphs, and torch.compile with CUDA graphs.
    graphs: bool = False
    # Also compare every variant with a run in float64.
    errors: bool = False
    # The name of a dtype; the device's default if None.
    dtype_name: str | None = None
    # Called with rows as soon as they are measured, and again with more fields, so that an interrupted run keeps them.
    on_rows: Callable[[list[Row]], None] = _not_kept

    def __post_init__(self) -> None:
        for name in self.without:
            if name not in ops.catalog():
                raise ConfigError(f"there is no op {name!r}; {nearest(name, ops.catalog())}")
        for name in self.against:
            if name not in (EAGER, YARDSTICK):
                raise ConfigError(f"nothing to measure against is called {name!r}; {nearest(name, (EAGER, YARDSTICK))}")
        if self.profile and EAGER not in self.against:
            raise ConfigError("--profile compares with the operators one by one: --against needs eager")
        if self.regime is not None and self.regime not in get_args(Regime):
            raise ConfigError(f"there is no regime {self.regime!r}; {nearest(self.regime, get_args(Regime))}")
        if self.mode not in MODES:
            raise ConfigError(f"there is no mode {self.mode!r}; {nearest(self.mode, MODES)}")
        if self.graphs and self.mode != "default":
            raise ConfigError(f"--graphs compares with mode 'reduce-overhead' already: leave out --mode {self.mode}")
        if self.dtype_name is not None and self.dtype_name not in DTYPES:
            raise ConfigError(f"there is no dtype {self.dtype_name!r} here; {nearest(self.dtype_name, DTYPES)}")
        if self.device_type == "cuda" and not device.cuda_available():
            raise ConfigError("device 'cuda' was asked for, and torch sees no CUDA device")

    def refuse_options_of_models(self, name: str, what: str) -> None:
        """Raise for options that only single models have."""
        if self.mode != "default" or self.without or self.exact or self.errors or self.kernels or self.profile:
            options = "--mode, --without, --exact, --errors, --kernels and --profile"
            raise ConfigError(f"{name} {what}: {options} concern single models")

    @property
    def variants(self) -> list[str]:
        """The variants of every workload, in order."""
        yardsticks = [name for name in (EAGER, YARDSTICK) if name in self.against]
        captured = [GRAPHS] * self.graphs + [TREES] * (self.graphs and YARDSTICK in self.against)
        others = [*[EXACT] * self.exact, *(f"{OURS} without {name}" for name in self.without)]
        return [*yardsticks, OURS, *captured, *others]

    @property
    def dtype(self) -> torch.dtype:
        if self.dtype_name is not None:
            return DTYPES[self.dtype_name]
        return torch.bfloat16 if self.device_type == "cuda" else torch.float32


@dataclass(frozen=True)
class Side:
    """One variant of a workload, compiled and warm."""

    model: Any
    call: Callable[[], Any]
    first_call_s: float


@dataclass(frozen=True)
class Compiled:
    """The call of a workload in one variant, and its compiled modules."""

    call: Callable[..., Any]
    parts: list[Any]


@dataclass(frozen=True)
class Outcome:
    """The rows of one workload, and its models by variant."""

    rows: list[Row]
    models: dict[str, Any]


def build(workload: Workload, settings: Settings) -> Built:
    return workload.build(settings.device_type, settings.dtype, small=settings.device_type == "cpu")


def regimes_of(workload: Workload, settings: Settings) -> list[Regime]:
    """Return the regimes of a workload that the settings choose."""
    chosen = [regime for regime in workload.regimes if settings.regime in (None, regime)]
    if not chosen:
        raise ConfigError(f"{workload.name} has no {settings.regime} sizes to measure: {', '.join(workload.regimes)}")
    return chosen


def run(workload: Workload, settings: Settings, notify: Notify = _silent) -> Outcome:
    """Measure one workload, in one regime after the other."""
    outcomes: list[Outcome] = []
    regimes = regimes_of(workload, settings)
    for index, regime in enumerate(regimes):

        def share(what: str, done: float, index: int = index) -> None:
            notify(what, (index + done) / len(regimes))

        if outcomes:
            release()
        outcomes.append(_run(workload, regime, settings, share))
        settings.on_rows(outcomes[-1].rows)
    return Outcome([row for outcome in outcomes for row in outcome.rows], outcomes[-1].models)


def _run(workload: Workload, regime: Regime, settings: Settings, notify: Notify) -> Outcome:
    """Measure one regime. The model is built outside inference mode, as users do; every call runs inside."""
    name = label(workload, regime)
    notify(f"{name}: building", 0.0)
    built = build(workload, settings)
    if settings.errors and not isinstance(built.model, nn.Module):
        raise ConfigError(f"--errors runs a module in float64, and {name} is a function")
    with torch.inference_mode():
        sides = _prepare(name, built, regime, settings, notify)
        what = f"{name}: timing {', '.join(sides)} in turns"
        notify(what, PREPARED)
        meter = measure.LoadMeter()
        timings = measure.interleave(
            {variant: side.call for variant, side in sides.items()},
            settings.device_type,
            seconds=settings.seconds,
            burst=_BURST.get(settings.device_type, 1),
            on_round=lambda share: notify(what, PREPARED + (1 - PREPARED) * share),
        )
        load = meter.read()
        totals = {v: operator_time(side.call, settings.device_type) for v, side in sides.items() if settings.profile}
        reference = tensor_of(compiled(built, EAGER, settings).call(**built.inputs), name)
        rows = [
            _row(name, built, settings, variant, side, timings=timings, totals=totals, reference=reference, load=load)
            for variant, side in sides.items()
        ]
        if settings.errors:
            # A float64 run may take longer than all the measuring before it.
            settings.on_rows(rows)
            notify(f"{name}: the same in float64", 1.0)
            exact = _in_float64(name, built)
            rows = [
                replace(row, error_f64=fidelity.error(tensor_of(side.call(), name), exact))
                for row, side in zip(rows, sides.values(), strict=True)
            ]
    return Outcome(rows, {variant: side.model for variant, side in sides.items()})


def _in_float64(name: str, built: Built) -> torch.Tensor:
    def call(wide: Any) -> Callable[..., Any]:
        return built.install(wide, lambda module: module)  # type: ignore[no-any-return]

    return tensor_of(fidelity.in_float64(built.model, (), built.inputs, call), name)


def release() -> None:
    """Drop compiled code and free memory, before the next workload is built."""
    torch.compiler.reset()
    gc.collect()
    if device.cuda_available():
        torch.cuda.empty_cache()


def compiled(built: Built, variant: str, settings: Settings, regime: Regime = "static") -> Compiled:
    """Compile a workload for a variant; all compiled variants get the same mode and the same dynamic sizes."""
    dynamic = True if regime == "dynamic" and built.dims is None else None
    parts: list[Any] = []

    def compile_(module: Any) -> Any:
        parts.append(_compiled(module, variant, settings, dynamic=dynamic))
        return parts[-1]

    return Compiled(built.install(built.model, compile_), parts)


def _static_inductor(gm: Any, example_inputs: Any) -> Any:
    """Call Inductor under another name, so that Dynamo keeps static and dynamic code apart."""
    return compat.inductor.compile_fx(gm, example_inputs)


def _compiled(model: Any, variant: str, settings: Settings, *, dynamic: bool | None) -> Any:
    if variant == EAGER:
        return model
    if variant == STATIC:
        return torch.compile(model, backend=_static_inductor, dynamic=False)
    if variant == YARDSTICK:
        return torch.compile(model, mode=settings.mode, dynamic=dynamic)
    if variant == TREES:
        return torch.compile(model, mode="reduce-overhead", dynamic=dynamic)
    tritium: Any = importlib.import_module("tritium")
    config = settings.config or CompilationConfig()
    if variant == EXACT:
        # Engine `eager` generates no code, so it has no mode.
        exact = config.with_(engine="eager", fidelity="exact")
        return torch.compile(model, backend=tritium.Backend(exact), dynamic=dynamic)
    if variant == GRAPHS:
        return torch.compile(model, backend=tritium.Backend(config.with_(graphs="with_compile")), dynamic=dynamic)
    left_out = variant.removeprefix(OURS).removeprefix(" without ")
    if left_out:
        config = config.with_(force_provider={left_out: ops.INDUCTOR})
    return torch.compile(model, backend=tritium.Backend(config), mode=settings.mode, dynamic=dynamic)


def _prepare(name: str, built: Built, regime: Regime, settings: Settings, notify: Notify) -> dict[str, Side]:
    sides = {}
    variants = [*settings.variants, *[STATIC] * (regime == "dynamic" and built.against_static)]
    marked = built.marked() if regime == "dynamic" else built.inputs
    if settings.cold:
        notify(f"{name}: starting the compiler", 0.0)
        start_compiler(settings.device_type)
    for index, variant in enumerate(variants):
        what = "first eager call" if variant == EAGER else f"compiling with {variant}"
        notify(f"{name}: {what}", PREPARED * index / len(variants))
        made = compiled(built, variant, settings, regime)
        call = call_of(made.call, built.inputs if variant == STATIC else marked)
        with compat.inductor.empty_cache() if settings.cold and variant != EAGER else contextlib.nullcontext():
            seconds = measure.first_call(call, settings.device_type)
        sides[variant] = Side(made.parts[0] if made.parts else built.model, call, seconds)
    return sides


def call_of(model: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        # CUDA graphs of a mode may then overwrite the output of the last call.
        torch.compiler.cudagraph_mark_step_begin()
        return model(**inputs)

    return call


def host_us(call: Callable[[], Any], device_type: str, calls: int = 20) -> float:
    """Return the median microseconds until a call returns. The device is idle at the start, so no queue blocks the host."""
    taken = []
    with measure.gpu_lock(device_type):
        for _ in range(calls):
            device.synchronize(device_type)
            start = time.perf_counter()
            result = call()
            taken.append((time.perf_counter() - start) * 1e6)
            del result
    return statistics.median(taken)


def start_compiler(device_type: str) -> None:
    """Compile a small function, so that the first side does not include the start of the compiler."""
    # Importing Inductor and building its pattern tables takes seconds, once a process.
    with compat.inductor.empty_cache():
        torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=device_type))


def tensor_of(output: Any, name: str) -> torch.Tensor:
    tensor = output
    # A model that takes a list of images returns a list.
    while isinstance(tensor, (tuple, list)) and tensor:
        tensor = tensor[0]
    if not isinstance(tensor, torch.Tensor):
        raise TritiumError(f"workload {name!r} returned {type(tensor).__name__} instead of a tensor")
    if not bool(tensor.isfinite().all()):
        raise TritiumError(f"workload {name!r} gave values that are not finite: its errors would mean nothing")
    # Replayed graphs overwrite their outputs.
    return tensor.clone()


def _not_captured(model: Any) -> str:
    """Say why a variant with graphs was not captured; empty if it was."""
    tritium: Any = importlib.import_module("tritium")
    reasons = dict.fromkeys(entry["declined"] for entry in tritium.explain(model).captures if entry["declined"])
    return "".join(f"; not captured: {reason}" for reason in reasons)


def _row(
    name: str,
    built: Built,
    settings: Settings,
    variant: str,
    side: Side,
    *,
    timings: Mapping[str, measure.Timing],
    totals: Mapping[str, float],
    reference: torch.Tensor,
    load: measure.Load | None,
) -> Row:
    timing, yardstick = timings[variant], timings.get(YARDSTICK)
    return Row(
        workload=name,
        variant=variant,
        mode=None if variant in (EAGER, EXACT) else "reduce-overhead" if variant == TREES else settings.mode,
        dtype=str(settings.dtype).removeprefix("torch."),
        shrunk=built.shrunk,
        note=built.note + (_not_captured(side.model) if variant == GRAPHS else ""),
        shapes=built.shapes,
        **asdict(timing),
        ratio=yardstick.median_ms / timing.median_ms if yardstick is not None else None,
        against_static=timing.median_ms / timings[STATIC].median_ms if STATIC in timings else None,
        first_call_s=side.first_call_s,
        first_call_cold=settings.cold,
        peak_memory_bytes=measure.peak_memory(side.call, settings.device_type),
        relative_l2=measure.relative_l2(tensor_of(side.call(), name), reference),
        disturbed=load.disturbed if load is not None else None,
        operators_us=totals.get(variant),
        fusion_gain=fusion_gain(totals[variant], totals[EAGER]) if variant in totals and variant != EAGER else None,
        host_us=host_us(side.call, settings.device_type) if settings.graphs else None,
        kernels=profile(side.call, settings.device_type) if settings.kernels and variant in (YARDSTICK, OURS) else None,
    )
