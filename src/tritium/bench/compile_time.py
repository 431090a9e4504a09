"""First calls of a whole FLUX denoiser with few and with many blocks: does compiling grow with the number of blocks?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tritium import compat, measure
from tritium.bench import sides
from tritium.bench.families.images import FLUX_512
from tritium.bench.results import OURS, YARDSTICK, Row
from tritium.bench.run import Notify, Settings, build, call_of, release, start_compiler, tensor_of
from tritium.bench.store import Clock, Store
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.report.explain import explain

# The backend with one compilation for equal blocks.
REUSED = f"{OURS} reuse_blocks"

# Double and single blocks: few, and those of FLUX.1-dev; on a CPU few and some more.
_FULL = ((2, 4), (19, 38))
_SMALL = ((1, 1), (3, 6))
# Seconds that one depth takes at most on a GPU.
_BUDGET = 240.0


@dataclass(frozen=True)
class Depth:
    """One number of blocks."""

    double: int
    single: int

    @property
    def name(self) -> str:
        return f"flux {self.double + self.single} blocks"


def depths(settings: Settings) -> list[Depth]:
    """List the depths to measure, the lesser first."""
    return [Depth(*counts) for counts in (_SMALL if settings.device_type == "cpu" else _FULL)]


def run(settings: Settings, store: Store, clock: Clock, notify: Notify) -> list[str]:
    """Measure every depth that the store lacks; return those for which no time was left."""
    dtype = str(settings.dtype).removeprefix("torch.")
    missing = [depth for depth in depths(settings) if not store.has(depth.name, dtype)]
    if settings.cold and missing:
        start_compiler(settings.device_type)
    for index, depth in enumerate(missing):
        if clock.left <= (_BUDGET / 2 if settings.device_type == "cuda" else 0):
            return [later.name for later in missing[index:]]

        def share(what: str, done: float, index: int = index) -> None:
            notify(what, (index + done) / len(missing))

        store.add(_measure(depth, settings, share))
        release()
    return []


def _compiled(model: Any, variant: str, settings: Settings) -> Any:
    if variant == YARDSTICK:
        return torch.compile(model)
    config = (settings.config or CompilationConfig()).with_(reuse_blocks=True)
    return torch.compile(model, backend=Backend(config))


def _reuse(model: Any) -> str:
    """Say what the report tells of the cut at repeated blocks."""
    told = [
        entry.get("declined") or entry.get("summary")
        for entry in explain(model).passes
        if entry["name"] == "reuse_blocks"
    ]
    return "; ".join(dict.fromkeys(filter(None, told)))


def _measure(depth: Depth, settings: Settings, notify: Notify) -> list[Row]:
    notify(f"{depth.name}: building", 0.0)
    blocks = {"num_layers": depth.double, "num_single_layers": depth.single}
    full, small = (
        replace(
            size,
            config={**size.config, **blocks},
            note=f"{depth.double} double + {depth.single} single blocks; {size.note.partition(', ')[2]}",
        )
        for size in (FLUX_512.full, FLUX_512.small)
    )
    built = build(replace(FLUX_512, full=full, small=small), settings)
    reference = tensor_of(sides.without_gradients(call_of(built.model, built.inputs))(), depth.name)
    calls: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    inductor: dict[str, float | None] = {}
    variants = [*[YARDSTICK] * (YARDSTICK in settings.against), REUSED]
    models = {variant: _compiled(built.model, variant, settings) for variant in variants}
    for index, (variant, model) in enumerate(models.items()):
        notify(f"{depth.name}: first call, {variant}", 0.9 * index / len(models))
        calls[variant] = sides.without_gradients(call_of(model, built.inputs))
        with sides.cold_caches(settings):
            before = compat.dynamo.inductor_seconds()
            first[variant] = measure.first_call(calls[variant], settings.device_type)
            after = compat.dynamo.inductor_seconds()
        inductor[variant] = None if after is None or before is None else after - before
    notify(f"{depth.name}: timing", 0.9)
    timings = measure.interleave(calls, settings.device_type, seconds=min(settings.seconds, 2.0))
    return [
        Row(
            workload=depth.name,
            variant=variant,
            mode="default",
            dtype=str(settings.dtype).removeprefix("torch."),
            shrunk=built.shrunk,
            note=built.note,
            shapes=built.shapes,
            **asdict(timing),
            ratio=timings[YARDSTICK].median_ms / timing.median_ms if YARDSTICK in timings else None,
            first_call_s=first[variant],
            first_call_cold=settings.cold,
            peak_memory_bytes=measure.peak_memory(calls[variant], settings.device_type),
            relative_l2=measure.relative_l2(tensor_of(calls[variant](), depth.name), reference),
            disturbed=None,
            inductor_s=inductor[variant],
            remark=_reuse(models[variant]) or None if variant == REUSED else None,
        )
        for variant, timing in timings.items()
    ]
