"""Decode many sizes with one compiled decoder: count recompiles, and measure the cost of dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritium import compat
from tritium.bench.comparison import Comparison, call_of, tensor_of
from tritium.bench.decoders import Decoder
from tritium.bench.results import EAGER, TRITIUM, TRITIUM_STATIC, Row
from tritium.bench.run import build
from tritium.bench.settings import Notify, Settings, silent
from tritium.bench.variants import compiled
from tritium.bench.workload import Normals, shapes_of

# Sizes that may compile: the first, and the second, which shows Dynamo the dynamic dims.
WARM = 2
# Indices of the sizes that are timed against a static compilation.
TIMED = (2, 6, 10)


def run(workload: Decoder, settings: Settings, notify: Notify) -> list[Row]:
    """Decode twelve sizes; count the graphs that the last ten compile, and time three of them."""
    built = build(workload, settings)
    normal = Normals(settings.device_type, settings.dtype)
    sizes = [normal(*shape) for shape in workload.sizes(small=built.shrunk)]
    for latents in sizes[:WARM] if workload.dims is not None else ():
        compat.dynamo.mark_dynamic(latents, workload.dims or ())
    models = {name: compiled(built, name, settings, dynamic=name == TRITIUM).call for name in (TRITIUM, TRITIUM_STATIC)}
    eager = compiled(built, EAGER, settings).call
    rows: list[Row] = []
    with torch.inference_mode():
        recompiles = _decode_all(workload, models[TRITIUM], sizes, notify)
        note = f"one of ten sizes after two others, which compiled {recompiles} graphs"
        for place, index in enumerate(TIMED):
            inputs = {workload.argument: sizes[index]}
            name = f"{workload.name} {_shape(sizes[index])}"
            notify(f"{name}: dynamic against a compilation of its own", 0.5 + 0.15 * place)
            comparison = Comparison(name, settings, note, shapes_of(inputs), built.shrunk)
            for variant, model in models.items():
                comparison.add(variant, call_of(model, inputs))
            comparison.time(silent, burst=3)
            reference = tensor_of(eager(**inputs), name)
            static = comparison.variants[TRITIUM_STATIC].fields["median_ms"]
            for variant, measured in comparison.variants.items():
                measured.fields |= {
                    "recompiles": recompiles,
                    "against_static": measured.fields["median_ms"] / static,
                    "peak_memory_bytes": comparison.peak_memory(variant),
                    "relative_l2": comparison.difference(variant, reference),
                }
            rows += comparison.rows()
    settings.on_rows(rows)
    return rows


def _decode_all(workload: Decoder, decode: Callable[..., Any], sizes: list[torch.Tensor], notify: Notify) -> int:
    """Decode sizes one after the other; return the number of graphs compiled after the first ones."""
    before = 0
    for index, latents in enumerate(sizes):
        notify(f"{workload.name}: {_shape(latents)}, size {index + 1} of {len(sizes)}", 0.5 * index / len(sizes))
        if index == WARM:
            before = compat.dynamo.graphs_compiled()
        decode(**{workload.argument: latents})
    return compat.dynamo.graphs_compiled() - before


def _shape(latents: torch.Tensor) -> str:
    return "x".join(map(str, latents.shape))
