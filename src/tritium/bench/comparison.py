"""Compare variants of one workload: first calls, interleaved timing, and one row for each."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tritium import compat, device, measure
from tritium.bench.results import INDUCTOR, Row
from tritium.bench.settings import Notify, Settings
from tritium.bench.variants import mode_of
from tritium.errors import TritiumError

# The share of a workload's time before the timing starts: most of it is compilation.
PREPARED = 0.7


@dataclass
class Variant:
    """One variant of a workload, and the fields of its row that are known."""

    call: Callable[[], Any]
    # What was compiled, for explain.
    model: Any = None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Comparison:
    """The variants of one workload while they are measured, on the same inputs and in one process."""

    workload: str
    settings: Settings
    note: str
    shapes: dict[str, list[int]]
    shrunk: bool
    # The variant that ratios are against.
    reference: str = INDUCTOR
    # Whole pipelines decide about gradients themselves.
    inference_mode: bool = True
    variants: dict[str, Variant] = field(default_factory=dict)

    def add(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        model: Any = None,
        settle: Callable[[Callable[[], Any]], None] | None = None,
    ) -> Variant:
        """Add a variant by its first call, and by the calls of `settle`, whose compilations count as recompiles."""
        fields: dict[str, Any] = {}
        with self.settings.caches(), torch.inference_mode(self.inference_mode):
            fields["first_call_s"] = measure.first_call(call, self.settings.device_type)
            if settle is not None:
                before = compat.dynamo.graphs_compiled()
                settle(call)
                fields["recompiles"] = compat.dynamo.graphs_compiled() - before
        self.variants[name] = Variant(call, model, fields)
        return self.variants[name]

    def result(self, name: str) -> torch.Tensor:
        """Return the tensor that a call of a variant gives."""
        with torch.inference_mode(self.inference_mode):
            return tensor_of(self.variants[name].call(), self.workload)

    def difference(self, name: str, reference: torch.Tensor) -> float:
        return measure.relative_l2(self.result(name), reference)

    def peak_memory(self, name: str) -> int | None:
        """Return the peak bytes of a call of a variant; None if unknown."""
        with torch.inference_mode(self.inference_mode):
            return measure.peak_memory(self.variants[name].call, self.settings.device_type)

    def time(self, notify: Notify, **options: Any) -> None:
        """Time all variants interleaved; `options` are those of `measure.interleave`."""
        what = f"{self.workload}: timing {', '.join(self.variants)} interleaved"
        notify(what, PREPARED)
        meter = measure.LoadMeter()
        with torch.inference_mode(self.inference_mode):
            timings = measure.interleave(
                {name: variant.call for name, variant in self.variants.items()},
                self.settings.device_type,
                seconds=self.settings.seconds,
                on_round=lambda share: notify(what, PREPARED + (1 - PREPARED) * share),
                **options,
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
        return [
            Row(
                **{
                    "workload": self.workload,
                    "variant": name,
                    "mode": mode_of(name, self.settings),
                    "dtype": self.settings.dtype_text,
                    "shrunk": self.shrunk,
                    "note": self.note,
                    "shapes": self.shapes,
                    "first_call_cold": self.settings.cold,
                    **variant.fields,
                }
            )
            for name, variant in self.variants.items()
        ]


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
