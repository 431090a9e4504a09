"""All workloads by name, and how each is measured: eager, plain torch.compile and Tritium in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from tritium import compat, fidelity
from tritium.bench import generation, layer_functions, pipelines
from tritium.bench.comparison import Comparison, call_of, compiled, host_us, release, start_compiler, tensor_of
from tritium.bench.decoders import DECODERS, Decoder
from tritium.bench.denoisers import DENOISERS, EXAMPLE
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.profile import operator_time, profile
from tritium.bench.results import EAGER, GRAPHS, INDUCTOR, STATIC, TRITIUM, TRITIUM_STATIC, Row
from tritium.bench.settings import Notify, Settings, part_of, silent
from tritium.bench.workload import Built, Normals, Workload
from tritium.errors import ConfigError, nearest
from tritium.report.explain import explain

_MODELS: tuple[Workload, ...] = (*DENOISERS, EXAMPLE, *DECODERS)

# A name may stand for several workloads.
WORKLOADS: Mapping[str, Sequence[Workload]] = {
    **{workload.name: (workload,) for workload in _MODELS},
    "dynamic-kernels": DYNAMIC_KERNELS,
}

# Calls in one turn: the host issues the next call while the device computes this one, as in a denoising loop.
_BURST = {"cuda": 5}

# With `--sizes`. Sizes that may compile: the first, and the second, which shows Dynamo the dynamic dims.
WARM = 2
# Indices of the sizes that are timed against a static compilation.
TIMED = (2, 6, 10)

Measure = Callable[[Settings, Notify], list[Row]]


def find(name: str, others: Sequence[str] = ()) -> Sequence[Workload]:
    """Return the workloads of a name; `others` are further names that the caller accepts."""
    if name not in WORKLOADS:
        hint = nearest(name, (*WORKLOADS, *others))
        raise ConfigError(f"there is no workload {name!r}, and no folder of that name holds a pipeline; {hint}")
    return WORKLOADS[name]


def measure_of(name: str, *, sizes: bool = False, dynamic: bool | None = None) -> Measure:
    """Return the function that measures a name: a pipeline, layer functions, or models, also with many `sizes`."""
    others = {name: functools.partial(layer_functions.run, name) for name in layer_functions.NAMES}
    if pipelines.is_pipeline(name):
        others[name] = functools.partial(pipelines.run, name)
    if name in others:
        if dynamic is not None:
            raise ConfigError(f"--regime concerns models with static and dynamic sizes, and {name} is none")
        return others[name]
    chosen = find(name, (generation.EXAMPLE, *layer_functions.NAMES))
    for workload in chosen:
        regimes_of(workload, dynamic)
    if sizes and not any(isinstance(workload, Decoder) for workload in chosen):
        raise ConfigError(f"--sizes concerns decoders, and {name} is none")

    def measure(settings: Settings, notify: Notify) -> list[Row]:
        rows: list[Row] = []
        for index, workload in enumerate(chosen):
            rows += run(workload, settings, part_of(notify, index, len(chosen)))
            if sizes and isinstance(workload, Decoder):
                rows += decode_sizes(workload, settings, notify)
        return rows

    return measure


def regimes_of(workload: Workload, dynamic: bool | None) -> list[bool]:
    """Return whether to measure static sizes (False), dynamic ones (True), or both in this order."""
    chosen = [regime for regime in workload.dynamic if dynamic in (None, regime)]
    if not chosen:
        asked, *there = ["dynamic" if regime else "static" for regime in (dynamic, *workload.dynamic)]
        raise ConfigError(f"{workload.name} has no {asked} sizes to measure: {', '.join(there)}")
    return chosen


def run(workload: Workload, settings: Settings, notify: Notify = silent) -> list[Row]:
    """Measure one workload, with static and then with dynamic sizes."""
    rows: list[Row] = []
    regimes = regimes_of(workload, settings.dynamic)
    for index, dynamic in enumerate(regimes):
        measured = _measure(workload, settings, part_of(notify, index, len(regimes)), dynamic=dynamic)
        settings.on_rows(measured)
        rows += measured
    return rows


def _measure(workload: Workload, settings: Settings, notify: Notify, *, dynamic: bool) -> list[Row]:
    """Measure one workload. The model is built outside inference mode, as users do; every call runs inside."""
    release()
    name = f"{workload.name} dynamic" if dynamic else workload.name
    notify(f"{name}: building", 0.0)
    built = settings.build(workload)
    if settings.errors and not isinstance(built.model, nn.Module):
        raise ConfigError(f"--errors runs a module in float64, and {name} is a function")
    if settings.quantize is not None and not isinstance(built.model, nn.Module):
        raise ConfigError(f"--quantize concerns modules, and {name} is a function")
    start_compiler(settings)
    variants = [*settings.variants, *[STATIC] * (dynamic and built.against_static)]
    comparison = Comparison.of(name, built, settings, notify)
    marked = built.marked() if dynamic else built.inputs
    for variant in variants:
        model = compiled(built, variant, settings, dynamic=dynamic)
        inputs = built.inputs if variant == STATIC else marked
        comparison.add(variant, call_of(model.call, inputs), model=model.parts[0] if model.parts else built.model)
    with torch.inference_mode():
        reference = tensor_of(compiled(built, EAGER, settings).call(**built.inputs), name)
        comparison.finish(reference, burst=_BURST.get(settings.device_type, 1))
        _add_fields(comparison, built)
        if settings.errors:
            # A float64 run may take longer than all the measuring before it.
            settings.on_rows(comparison.rows())
            notify(f"{name}: the same in float64", 1.0)
            exact = _in_float64(name, built)
            for variant, measured in comparison.variants.items():
                measured.fields["error_f64"] = fidelity.error(comparison.result(variant), exact)
    return comparison.rows()


def _add_fields(comparison: Comparison, built: Built) -> None:
    """Measure the figures other than times that the settings ask for."""
    settings, variants = comparison.settings, comparison.variants
    where = settings.device_type
    for name, variant in variants.items():
        fields = variant.fields
        if STATIC in variants:
            fields["against_static"] = fields["median_ms"] / variants[STATIC].fields["median_ms"]
        if settings.profile:
            fields["operators_us"] = operator_time(variant.call, where)
            if name != EAGER:
                fields["fusion_gain"] = fields["operators_us"] / variants[EAGER].fields["operators_us"] - 1
        if settings.graphs:
            fields["host_us"] = host_us(variant.call, where)
        if settings.kernels and name in (INDUCTOR, TRITIUM):
            fields["kernels"] = profile(variant.call, where)
        if name == GRAPHS:
            captures = explain(variant.model).captures
            reasons = dict.fromkeys(entry["declined"] for entry in captures if entry["declined"])
            fields["note"] = built.note + "".join(f"; not captured: {reason}" for reason in reasons)


def _in_float64(name: str, built: Built) -> torch.Tensor:
    exact = fidelity.in_float64(built.model, (), built.inputs, lambda wide: built.install(wide, lambda module: module))
    return tensor_of(exact, name)


def decode_sizes(workload: Decoder, settings: Settings, notify: Notify) -> list[Row]:
    """Decode twelve sizes; count the graphs that the last ten compile, and time three of them."""
    release()
    built = settings.build(workload)
    normal = Normals(settings.device_type, settings.dtype)
    calls = [{workload.argument: normal(*shape)} for shape in workload.sizes(small=built.shrunk)]
    for inputs in calls[:WARM] if workload.dims is not None else ():
        compat.dynamo.mark_dynamic(inputs[workload.argument], workload.dims or ())
    models = {name: compiled(built, name, settings, dynamic=name == TRITIUM).call for name in (TRITIUM, TRITIUM_STATIC)}
    eager = compiled(built, EAGER, settings).call
    rows: list[Row] = []
    with torch.inference_mode():
        for index, inputs in enumerate(calls):
            notify(f"{workload.name}: size {index + 1} of {len(calls)}", 0.5 * index / len(calls))
            if index == WARM:
                compiled_before = compat.dynamo.graphs_compiled()
            models[TRITIUM](**inputs)
        recompiles = compat.dynamo.graphs_compiled() - compiled_before
        note = f"one of ten sizes after two others, which compiled {recompiles} graphs"
        for place, inputs in enumerate(calls[index] for index in TIMED):
            name = f"{workload.name} {'x'.join(map(str, inputs[workload.argument].shape))}"
            notify(f"{name}: dynamic against a compilation of its own", 0.5 + 0.15 * place)
            sized = Built(built.model, inputs, note, built.shrunk)
            comparison = Comparison.of(name, sized, settings, silent)
            for variant, model in models.items():
                comparison.add(variant, call_of(model, inputs))
            comparison.finish(tensor_of(eager(**inputs), name), burst=3)
            static = comparison.variants[TRITIUM_STATIC].fields["median_ms"]
            for measured in comparison.variants.values():
                measured.fields["recompiles"] = recompiles
                measured.fields["against_static"] = measured.fields["median_ms"] / static
            rows += comparison.rows()
    settings.on_rows(rows)
    return rows
