"""Time computed and skipped steps of a FLUX-shaped pipeline: on the device, and until the call returns on the host.

    python benchmarks/skipped_step.py --out h200-skipped-step.json

A skipped step costs the same for any number of blocks, so the transformer has few of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tritium
from tritium import device
from tritium.bench import flux_pipeline
from tritium.bench.results import Results, Row
from tritium.bench.settings import Settings
from tritium.bench.workload import Normals

STEPS, RUNS = 28, 14


class Watch:
    """Seconds of the host and pairs of events on the device, one a call."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.host: list[float] = []
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if self.on_gpu:
            torch.cuda.synchronize()
            self.events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.events[-1][0].record()
        start = time.perf_counter()
        result = function(*arguments, **named)
        self.host.append(time.perf_counter() - start)
        if self.on_gpu:
            self.events[-1][1].record()
        return result

    def milliseconds(self) -> list[float]:
        if not self.on_gpu:
            return [seconds * 1e3 for seconds in self.host]
        torch.cuda.synchronize()
        return [first.elapsed_time(second) for first, second in self.events]


def watched(transformer: Any, watch: Watch) -> None:
    """Time every call of a module from outside of what `optimize` does to it."""
    original = type(transformer)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return watch.call(original.__call__, self, *arguments, **named)

    transformer.__class__ = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})


def measure(images: int) -> list[Row]:
    where = device.default()
    settings = Settings(seconds=1.0, device_type=where)
    scale = replace(flux_pipeline.SMALL if settings.small else flux_pipeline.FULL, steps=STEPS)
    few = {"num_layers": 1, "num_single_layers": 2}
    scale = replace(scale, transformer={**scale.transformer, **few}, sizes=scale.sizes[:1])
    pipe = flux_pipeline.build(scale, where, settings.dtype)
    watch = Watch(on_gpu=where == "cuda")
    watched(pipe.transformer, watch)
    generate = flux_pipeline.generator(scale, scale.sizes[0], pipe, Normals(where, settings.dtype))
    plan = tritium.Skip.window(steps=STEPS, runs=RUNS, first=3, last=2, growth=0.3, order=1)
    kept: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with torch.inference_mode(), tritium.optimize(pipe, tritium.Plan(skip=plan, progress=False)):
        for image in range(images + 2):
            watch.host, watch.events = [], []
            generate()
            if image < 2:
                continue
            for letter, device_ms, host in zip(plan.rows[0], watch.milliseconds(), watch.host, strict=True):
                kept[letter == "R"].append((device_ms, host * 1e6))
    rows = []
    for variant, samples in (("computed step", kept[True]), ("skipped step", kept[False])):
        times = sorted(ms for ms, _ in samples)
        quarter = len(times) // 4
        rows.append(
            Row(
                workload="skipped step",
                variant=variant,
                mode=None,
                dtype=str(settings.dtype).removeprefix("torch."),
                shrunk=settings.small,
                note=f"1 + 2 blocks, {scale.sizes[0]} x {scale.sizes[0]} pixels, Skip.window({STEPS}, {RUNS}), order 1",
                shapes={},
                median_ms=statistics.median(times),
                lower_quartile_ms=times[quarter],
                upper_quartile_ms=times[-1 - quarter],
                samples=len(times),
                ratio=None,
                first_call_s=0.0,
                first_call_cold=False,
                peak_memory_bytes=None,
                relative_l2=0.0,
                disturbed=None,
                host_us=statistics.median(us for _, us in samples),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=int, default=8)
    given = parser.parse_args()
    rows = measure(given.images)
    for row in rows:
        print(f"{row.variant}: {row.median_ms:.3f} ms on the device, {row.host_us:.0f} us on the host")
    if given.out:
        Results.now(rows, device.default()).save(given.out)


if __name__ == "__main__":
    main()
