"""First calls of a whole FLUX denoiser with few and with many blocks: does compiling grow with the number of blocks?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tritium import compat
from tritium.bench.comparison import Comparison, call_of, release, tensor_of
from tritium.bench.denoisers import Denoiser, find_families
from tritium.bench.results import INDUCTOR, REUSE_BLOCKS
from tritium.bench.run import build
from tritium.bench.settings import Notify, Settings
from tritium.bench.store import Clock, Store
from tritium.bench.suite import Measured, Outcome, Task, measure_all, missing
from tritium.bench.variants import compile_variant
from tritium.report.explain import explain

# Double and single blocks: few, and those of FLUX.1-dev; on a CPU few and some more.
_FULL = ((2, 4), (19, 38))
_SMALL = ((1, 1), (3, 6))

# A depth starts only if this much time is left on a GPU. It takes at most twice as long.
_SECONDS = 120.0


def run(only: Sequence[str], settings: Settings, store: Store, clock: Clock, notify: Notify) -> Outcome:
    """Measure every depth that the store lacks, the lesser first."""
    del only
    tasks = [_task(*blocks, settings) for blocks in (_SMALL if settings.small else _FULL)]
    return measure_all(missing(tasks, settings, store), settings, store, clock, notify)


def _task(double: int, single: int, settings: Settings) -> Task:
    (flux,) = find_families(["flux-512"])
    blocks = {"num_layers": double, "num_single_layers": single}
    full, small = (replace(size, config={**size.config, **blocks}) for size in (flux.full, flux.small))
    deep = replace(flux, name=f"flux {double + single} blocks", full=full, small=small)
    return Task(deep.name, _SECONDS, lambda _clock, notify: _measure(deep, settings, notify))


def _measure(denoiser: Denoiser, settings: Settings, notify: Notify) -> Measured:
    notify(f"{denoiser.name}: building", 0.0)
    built = build(denoiser, settings)
    quick = replace(settings, seconds=min(settings.seconds, 2.0))
    comparison = Comparison(denoiser.name, quick, built.note, built.shapes, built.shrunk)
    with torch.inference_mode():
        reference = tensor_of(built.model(**built.inputs), denoiser.name)
    names = [*[INDUCTOR] * (INDUCTOR in settings.against), REUSE_BLOCKS]
    for index, name in enumerate(names):
        notify(f"{denoiser.name}: first call, {name}", 0.7 * index / len(names))
        model = compile_variant(built.model, name, settings)
        before = compat.dynamo.inductor_seconds()
        variant = comparison.add(name, call_of(model, built.inputs), model=model)
        after = compat.dynamo.inductor_seconds()
        variant.fields["inductor_s"] = None if after is None or before is None else after - before
    comparison.time(notify)
    for name, variant in comparison.variants.items():
        variant.fields["peak_memory_bytes"] = comparison.peak_memory(name)
        variant.fields["relative_l2"] = comparison.difference(name, reference)
    # The report says how the graph was cut at repeated blocks.
    cuts = [
        entry for entry in explain(comparison.variants[REUSE_BLOCKS].model).passes if entry["name"] == "reuse_blocks"
    ]
    said = dict.fromkeys(filter(None, (entry.get("declined") or entry.get("summary") for entry in cuts)))
    comparison.variants[REUSE_BLOCKS].fields["remark"] = "; ".join(said) or None
    rows = comparison.rows()
    release()
    return Measured(rows)
