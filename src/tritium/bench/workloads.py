"""All workloads by name, and how each is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from tritium.bench import decoder_sizes, generation, layer_functions, pipelines, run
from tritium.bench.comparison import release
from tritium.bench.decoders import DECODERS, Decoder
from tritium.bench.denoisers import DENOISERS, EXAMPLE
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.results import Row
from tritium.bench.settings import Notify, Settings, part_of
from tritium.bench.workload import Workload
from tritium.errors import ConfigError, nearest

_MODELS: tuple[Workload, ...] = (*DENOISERS, EXAMPLE, *DECODERS)

# A name may stand for several workloads.
WORKLOADS: Mapping[str, Sequence[Workload]] = {
    **{workload.name: (workload,) for workload in _MODELS},
    "dynamic-kernels": DYNAMIC_KERNELS,
}

Measure = Callable[[Settings, Notify], list[Row]]


def find(name: str, others: Sequence[str] = ()) -> Sequence[Workload]:
    """Return the workloads of a name; `others` are further names that the caller accepts."""
    if name not in WORKLOADS:
        hint = nearest(name, (*WORKLOADS, *others))
        raise ConfigError(f"there is no workload {name!r}, and no folder of that name holds a pipeline; {hint}")
    return WORKLOADS[name]


def measure_of(name: str, *, sizes: bool = False) -> Measure:
    """Return the function that measures a name: a pipeline, layer functions, or models, also with many `sizes`."""
    if pipelines.is_pipeline(name):
        return functools.partial(pipelines.run, name)
    if name in layer_functions.NAMES:
        return functools.partial(layer_functions.run, name)
    chosen = find(name, (generation.EXAMPLE, *layer_functions.NAMES))
    if sizes and not any(isinstance(workload, Decoder) for workload in chosen):
        raise ConfigError(f"--sizes concerns decoders, and {name} is none")
    return functools.partial(_measure_all, chosen, sizes=sizes)


def check_sizes(name: str, settings: Settings) -> None:
    """Raise for a workload without the static or dynamic sizes that the settings choose."""
    if pipelines.is_pipeline(name) or name in layer_functions.NAMES:
        raise ConfigError(f"--regime concerns models with static and dynamic sizes, and {name} is none")
    for workload in find(name):
        run.sizes_of(workload, settings)


def _measure_all(chosen: Sequence[Workload], settings: Settings, notify: Notify, *, sizes: bool) -> list[Row]:
    rows: list[Row] = []
    for index, workload in enumerate(chosen):
        if rows:
            release()
        rows += run.run(workload, settings, part_of(notify, index, len(chosen)))
        if sizes and isinstance(workload, Decoder):
            release()
            rows += decoder_sizes.run(workload, settings, notify)
    return rows
