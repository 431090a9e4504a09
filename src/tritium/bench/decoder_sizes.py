"""Decode many sizes with one compiled decoder: count recompiles, and measure the cost of dynamic sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat, measure
from tritium.bench.decoders import Decoder
from tritium.bench.results import OURS, Row
from tritium.bench.run import Notify, Outcome, Settings, build, compiled
from tritium.bench.workload import Built, drawing
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig

# Sizes that may compile: the first, and the second, which shows Dynamo the dynamic dims.
WARM = 2
# Indices of the sizes that are timed against a static compilation.
TIMED = (2, 6, 10)

OWN = f"{OURS} static"


class _ForOneSize(Backend):
    """A backend that is not equal to the dynamic one, so that Dynamo keeps their code apart."""

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), "one size")


def run(workload: Decoder, settings: Settings, notify: Notify) -> Outcome:
    """Decode twelve sizes; count the graphs that the last ten compile, and time three of them."""
    built = build(workload, settings)
    draw = drawing(settings.device_type, settings.dtype)
    sizes = [draw(*shape) for shape in workload.sizes(small=built.shrunk)]
    if workload.dims is not None:
        for latents in sizes[:WARM]:
            torch._dynamo.mark_dynamic(latents, list(workload.dims))
    rows: list[Row] = []
    with torch.inference_mode():
        dynamic = compiled(built, OURS, settings, "dynamic").call
        recompiles = _in_a_row(workload, dynamic, sizes, notify)
        for place, index in enumerate(TIMED):
            latents = sizes[index]
            notify(f"{workload.name}: {_shape(latents)} dynamic against a compilation of its own", 0.5 + 0.15 * place)
            rows += _compare(workload, built, dynamic, latents, settings, recompiles)
    settings.on_rows(rows)
    return Outcome(rows, {OURS: built.model})


def _in_a_row(workload: Decoder, decode: Callable[..., Any], sizes: list[torch.Tensor], notify: Notify) -> int:
    before = 0
    for index, latents in enumerate(sizes):
        notify(f"{workload.name}: {_shape(latents)}, size {index + 1} of {len(sizes)}", 0.5 * index / len(sizes))
        if index == WARM:
            before = compat.dynamo.graphs_compiled()
        decode(**{workload.argument: latents})
    return compat.dynamo.graphs_compiled() - before


def _compare(
    workload: Decoder,
    built: Built,
    dynamic: Callable[..., Any],
    latents: torch.Tensor,
    settings: Settings,
    recompiles: int,
) -> list[Row]:
    backend = _ForOneSize(settings.config or CompilationConfig())

    def compile_(module: Any) -> Any:
        return torch.compile(module, backend=backend, dynamic=False)

    own = built.install(built.model, compile_)
    inputs = {workload.argument: latents}
    calls: dict[str, Callable[[], Any]] = {OURS: lambda: dynamic(**inputs), OWN: lambda: own(**inputs)}
    first = {name: measure.first_call(call, settings.device_type) for name, call in calls.items()}
    timings = measure.interleave(calls, settings.device_type, seconds=settings.seconds, burst=3)
    reference = built.install(built.model, lambda module: module)(**inputs)
    return [
        Row(
            workload=f"{workload.name} {_shape(latents)}",
            variant=name,
            mode="default",
            dtype=str(settings.dtype).removeprefix("torch."),
            shrunk=built.shrunk,
            note=f"one of ten sizes after two others, which compiled {recompiles} graphs",
            shapes={workload.argument: list(latents.shape)},
            **dataclasses.asdict(timings[name]),
            ratio=None,
            first_call_s=first[name],
            first_call_cold=False,
            peak_memory_bytes=measure.peak_memory(call, settings.device_type),
            relative_l2=measure.relative_l2(call(), reference),
            disturbed=None,
            against_static=timings[name].median_ms / timings[OWN].median_ms,
            recompiles=recompiles,
        )
        for name, call in calls.items()
    ]


def _shape(latents: torch.Tensor) -> str:
    return "x".join(map(str, latents.shape))
