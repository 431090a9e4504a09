"""Measure a model under eager, plain torch.compile and Tritium, interleaved in one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tritium import fidelity
from tritium.bench.comparison import PREPARED, Comparison, call_of, host_us, release, tensor_of
from tritium.bench.profile import fusion_gain, operator_time, profile
from tritium.bench.results import EAGER, GRAPHS, INDUCTOR, STATIC, TRITIUM, Row
from tritium.bench.settings import Notify, Settings, part_of, silent
from tritium.bench.variants import compiled, start_compiler
from tritium.bench.workload import Built, Workload, label
from tritium.errors import ConfigError

# Calls in one turn: the host issues the next call while the device computes this one, as in a denoising loop.
_BURST = {"cuda": 5}


def build(workload: Workload, settings: Settings) -> Built:
    return workload.build(settings.device_type, settings.dtype, small=settings.small)


def sizes_of(workload: Workload, settings: Settings) -> list[bool]:
    """Return whether to measure static sizes (False), dynamic ones (True), or both in this order."""
    chosen = [dynamic for dynamic in workload.dynamic if settings.dynamic in (None, dynamic)]
    if not chosen:
        named = ["dynamic" if dynamic else "static" for dynamic in (settings.dynamic, *workload.dynamic)]
        raise ConfigError(f"{workload.name} has no {named[0]} sizes to measure: {', '.join(named[1:])}")
    return chosen


def run(workload: Workload, settings: Settings, notify: Notify = silent) -> list[Row]:
    """Measure one workload, with static and then with dynamic sizes."""
    rows: list[Row] = []
    sizes = sizes_of(workload, settings)
    for index, dynamic in enumerate(sizes):
        if rows:
            release()
        measured = _measure(workload, settings, part_of(notify, index, len(sizes)), dynamic=dynamic)
        settings.on_rows(measured)
        rows += measured
    return rows


def _measure(workload: Workload, settings: Settings, notify: Notify, *, dynamic: bool) -> list[Row]:
    """Measure one workload. The model is built outside inference mode, as users do; every call runs inside."""
    name = label(workload, dynamic=dynamic)
    notify(f"{name}: building", 0.0)
    built = build(workload, settings)
    if settings.errors and not isinstance(built.model, nn.Module):
        raise ConfigError(f"--errors runs a module in float64, and {name} is a function")
    comparison = Comparison(name, settings, built.note, built.shapes, built.shrunk)
    _prepare(comparison, built, notify, dynamic=dynamic)
    comparison.time(notify, burst=_BURST.get(settings.device_type, 1))
    with torch.inference_mode():
        _add_fields(comparison, built)
        if settings.errors:
            # A float64 run may take longer than all the measuring before it.
            settings.on_rows(comparison.rows())
            notify(f"{name}: the same in float64", 1.0)
            exact = _in_float64(name, built)
            for variant, measured in comparison.variants.items():
                measured.fields["error_f64"] = fidelity.error(comparison.result(variant), exact)
    return comparison.rows()


def _prepare(comparison: Comparison, built: Built, notify: Notify, *, dynamic: bool) -> None:
    """Compile every variant by its first call."""
    name, settings = comparison.workload, comparison.settings
    variants = [*settings.variants, *[STATIC] * (dynamic and built.against_static)]
    marked = built.marked() if dynamic else built.inputs
    notify(f"{name}: starting the compiler", 0.0)
    start_compiler(settings)
    for index, variant in enumerate(variants):
        what = "first eager call" if variant == EAGER else f"compiling with {variant}"
        notify(f"{name}: {what}", PREPARED * index / len(variants))
        model = compiled(built, variant, settings, dynamic=dynamic)
        inputs = built.inputs if variant == STATIC else marked
        comparison.add(variant, call_of(model.call, inputs), model=model.parts[0] if model.parts else built.model)


def _add_fields(comparison: Comparison, built: Built) -> None:
    """Measure what timing does not show."""
    settings, variants = comparison.settings, comparison.variants
    where = settings.device_type
    reference = tensor_of(compiled(built, EAGER, settings).call(**built.inputs), comparison.workload)
    static = variants[STATIC].fields["median_ms"] if STATIC in variants else None
    for name, variant in variants.items():
        fields = variant.fields
        fields["peak_memory_bytes"] = comparison.peak_memory(name)
        fields["relative_l2"] = comparison.difference(name, reference)
        if static is not None:
            fields["against_static"] = fields["median_ms"] / static
        if settings.profile:
            fields["operators_us"] = operator_time(variant.call, where)
            if name != EAGER:
                fields["fusion_gain"] = fusion_gain(fields["operators_us"], variants[EAGER].fields["operators_us"])
        if settings.graphs:
            fields["host_us"] = host_us(variant.call, where)
        if settings.kernels and name in (INDUCTOR, TRITIUM):
            fields["kernels"] = profile(variant.call, where)
        if name == GRAPHS:
            fields["note"] = built.note + _not_captured(variant.model)


def _not_captured(model: Any) -> str:
    """Say why a variant with graphs was not captured; empty if it was."""
    tritium: Any = importlib.import_module("tritium")
    reasons = dict.fromkeys(entry["declined"] for entry in tritium.explain(model).captures if entry["declined"])
    return "".join(f"; not captured: {reason}" for reason in reasons)


def _in_float64(name: str, built: Built) -> torch.Tensor:
    def call(wide: Any) -> Callable[..., Any]:
        return built.install(wide, lambda module: module)  # type: ignore[no-any-return]

    return tensor_of(fidelity.in_float64(built.model, (), built.inputs, call), name)
