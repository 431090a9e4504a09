"""Measure the variants of one workload in one process: first calls, interleaved timing, and one row for each.

All variants share the weights. Dynamo keys compiled code on code object and backend, so wrapping a module twice gives two
independent compiled versions.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from tritium import compat, device, measure
from tritium.api import Handle, optimize
from tritium.bench.results import (
    EAGER,
    EXACT,
    GRAPHS,
    INDUCTOR,
    OPTIMIZED,
    REDUCE_OVERHEAD,
    REUSE_BLOCKS,
    STATIC,
    TRITIUM,
    TRITIUM_STATIC,
    Row,
)
from tritium.bench.settings import Notify, Settings, quantized
from tritium.bench.workload import Built, shapes_of
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, TritiumError
from tritium.pipelines.plan import Plan

# The share of a workload's time before the timing starts: most of it is compilation.
PREPARED = 0.7


@dataclass
class Variant:
    """One variant of a workload, and the fields of its row that are known."""

    call: Callable[[], Any]
    # What was compiled, for explain.
    model: Any = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Comparison:
    """The variants of one workload while they are measured, on the same inputs."""

    workload: str
    settings: Settings
    notify: Notify
    note: str = ""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    shrunk: bool
    # The variant that ratios are against.
    reference: str = INDUCTOR
    # Whole pipelines decide about gradients themselves.
    inference_mode: bool = True
    variants: dict[str, Variant] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, built: Built, settings: Settings, notify: Notify) -> Comparison:
        shapes = shapes_of(built.inputs)
        return cls(workload=name, settings=settings, notify=notify, note=built.note, shapes=shapes, shrunk=built.shrunk)

    def add(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        model: Any = None,
        settle: Callable[[Callable[[], Any]], None] | None = None,
        caches: contextlib.AbstractContextManager[None] | None = None,
    ) -> Variant:
        """Add a variant by its first call, with empty caches or those given, and by the calls of `settle`."""
        done = len(self.variants)
        self.notify(f"{self.workload}: first call, {name}", PREPARED * done / (done + 1))
        variant = Variant(call, model)
        shared = measure.gpu_lock(self.settings.device_type, shared=True)
        with shared, caches or self.settings.caches(), torch.inference_mode(self.inference_mode):
            variant.fields["first_call_s"] = measure.first_call(call, self.settings.device_type)
            if settle is not None:
                self.settle(variant, settle)
        self.variants[name] = variant
        return variant

    def settle(self, variant: Variant, settle: Callable[[Callable[[], Any]], None]) -> None:
        """Call a variant until it has settled; what compiles then counts as a recompile."""
        before = compat.dynamo.graphs_compiled()
        with torch.inference_mode(self.inference_mode):
            settle(variant.call)
        variant.fields["recompiles"] = compat.dynamo.graphs_compiled() - before

    def result(self, name: str) -> torch.Tensor:
        """Return the tensor that a call of a variant gives."""
        with torch.inference_mode(self.inference_mode):
            return tensor_of(self.variants[name].call(), self.workload)

    def peak_memory(self, name: str) -> int | None:
        """Return the peak bytes of a call of a variant; None if unknown."""
        with torch.inference_mode(self.inference_mode):
            return measure.peak_memory(self.variants[name].call, self.settings.device_type)

    def finish(self, reference: torch.Tensor, **options: Any) -> None:
        """Time all variants, then measure the memory of each and its difference from a reference."""
        self.time(**options)
        for name, variant in self.variants.items():
            variant.fields["peak_memory_bytes"] = self.peak_memory(name)
            variant.fields["relative_l2"] = measure.relative_l2(self.result(name), reference)

    def time(self, **options: Any) -> None:
        """Time all variants interleaved; `options` are those of `measure.interleave`."""
        what = f"{self.workload}: timing {', '.join(self.variants)} interleaved"
        self.notify(what, PREPARED)
        meter = measure.LoadMeter()
        with torch.inference_mode(self.inference_mode):
            timings = measure.interleave(
                {name: variant.call for name, variant in self.variants.items()},
                self.settings.device_type,
                on_round=lambda share: self.notify(what, PREPARED + (1 - PREPARED) * share),
                **{"seconds": self.settings.seconds, **options},
            )
        load = meter.read()
        reference = timings.get(self.reference)
        for name, timing in timings.items():
            self.variants[name].fields |= {
                **asdict(timing),
                "ratio": reference.median_ms / timing.median_ms if reference is not None else None,
                "disturbed": load.disturbed if load is not None else None,
            }

    def rows(self) -> list[Row]:
        shared = {
            "workload": self.workload,
            "dtype": self.settings.dtype_text,
            "shrunk": self.shrunk,
            "note": self.note,
            "shapes": self.shapes,
            "first_call_cold": self.settings.cold,
        }
        return [
            Row(**{**shared, "variant": name, "mode": mode_of(name, self.settings), **variant.fields})
            for name, variant in self.variants.items()
        ]


class _VariantBackend(Backend):
    """A backend that equals only those of its variant, so that Dynamo shares no code between variants."""

    def __init__(self, config: CompilationConfig, variant: str) -> None:
        self._variant = variant
        super().__init__(config)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._variant)


def _static_inductor(gm: Any, example_inputs: Any) -> Any:
    """Call Inductor under another name, so that Dynamo keeps static and dynamic code apart."""
    return compat.inductor.compile_fx(gm, example_inputs)


def compile_variant(model: Any, variant: str, settings: Settings, *, dynamic: bool | None = None) -> Any:
    """Compile a module or function for a variant; all compiled variants get the same mode and the same dynamic sizes."""
    if variant in (STATIC, TRITIUM_STATIC):
        dynamic = False
    if variant == EAGER:
        return model
    if settings.quantize is not None and variant == settings.quantized:
        return _quantized(model, settings)
    if variant == STATIC:
        return torch.compile(model, backend=_static_inductor, dynamic=dynamic)
    mode = mode_of(variant, settings)
    if variant in (INDUCTOR, REDUCE_OVERHEAD):
        return torch.compile(model, mode=mode, dynamic=dynamic)
    changes: dict[str, dict[str, Any]] = {
        EXACT: {"engine": "eager", "fidelity": "exact"},
        GRAPHS: {"graphs": "with_compile"},
        REUSE_BLOCKS: {"reuse_blocks": True},
    }
    config = (settings.config or CompilationConfig()).with_(**changes.get(variant, {}))
    return torch.compile(model, backend=_VariantBackend(config, variant), mode=mode, dynamic=dynamic)


def _quantized(model: Any, settings: Settings) -> Any:
    """Return a copy of a module that `tritium.optimize` quantizes; the weights stay those of the original."""
    copied = twin(model)
    config = settings.config or CompilationConfig()
    handle = optimize(copied, Plan(progress=False, config=config, quantize=quantized(settings.quantize or "")))
    if not any("quantize" in component.techniques for component in handle.components):
        raise ConfigError(f"--quantize: {handle.components[0].what}")
    return copied


def mode_of(variant: str, settings: Settings) -> str | None:
    """Return the mode that torch.compile gets for a variant; None where it is not called, or for code without a mode."""
    if variant == REDUCE_OVERHEAD:
        return "reduce-overhead"
    # Engine `eager`, which `exact` uses, generates no code.
    is_compiled = variant.startswith((INDUCTOR, TRITIUM)) and variant not in (EXACT, OPTIMIZED, settings.quantized)
    return settings.mode if is_compiled else None


class Compiled(NamedTuple):
    """The call of a workload in one variant, and its compiled modules."""

    call: Callable[..., Any]
    parts: list[Any]


def compiled(built: Built, variant: str, settings: Settings, *, dynamic: bool = False) -> Compiled:
    """Compile the parts of a workload for a variant."""
    parts: list[Any] = []

    def compile_(module: Any) -> Any:
        all_dims = True if dynamic and built.dims is None else None
        parts.append(compile_variant(module, variant, settings, dynamic=all_dims))
        return parts[-1]

    return Compiled(built.install(built.model, compile_), parts)


def start_compiler(settings: Settings) -> None:
    """Compile a small function: the first call of a process imports Inductor, which takes seconds."""
    if settings.cold:
        with compat.inductor.empty_cache():
            torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=settings.device_type))


def optimized(target: Any, settings: Settings) -> Handle:
    """Optimize a pipeline or a bare module with the defaults, in place."""
    return optimize(target, Plan(progress=False, config=settings.config or CompilationConfig()))


def twin(model: Any) -> Any:
    """Copy a module tree; parameters and buffers stay the tensors of the original.

    What a variant does in place (compiled blocks, a handle) is then invisible to the others, so that they can be
    interleaved.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


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


def tensor_of(output: Any, name: str) -> torch.Tensor:
    """Return the tensor to compare: the output, or the first of several."""
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


def release() -> None:
    """Drop compiled code and free memory, before the next workload is built."""
    torch.compiler.reset()
    gc.collect()
    if device.cuda_available():
        torch.cuda.empty_cache()
