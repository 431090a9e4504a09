"""Measure the time of each recorded kernel: profile some calls and match every event with its kernel.

Kernels that generated code launches are matched by name. Operators that it calls (matrix products, attention) are
matched by the order of calls in the graph. If the numbers of events and recorded calls differ, these kernels stay
unmeasured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from tritium import compat, device, measure
from tritium.report.observation import Kernel
from tritium.report.records import GraphRecord, Measurement

# Calls under the profiler, after one warm-up call.
CALLS = 3

# (graph, name of the event) -> microseconds of every event, in order.
EventTimes = dict[tuple[str, str], list[float]]


def time_kernels(records: Sequence[GraphRecord], call: Callable[[], Any]) -> tuple[list[GraphRecord], Measurement]:
    """Return copies of records with `measured_us` in their kernels, and how they were measured."""
    types = {record.device_type for record in records}
    device_type = "cuda" if "cuda" in types else "cpu"
    meter = measure.LoadMeter()
    plain = [_milliseconds(call, device_type) for _ in range(CALLS)]
    names = {kernel.name for record in records for kernel in record.kernels if kernel.kind == "generated"}
    with compat.profiler.visible_kernels(names):
        times, runs = attribute(_profiled(call, device_type), device_type)
    load = meter.read()
    timed = [with_times(record, times, runs) for record in records]
    kernels = [kernel for record in timed if record.runs for kernel in record.kernels]
    return timed, Measurement(
        calls=CALLS,
        call_ms=statistics.median(plain),
        timed=sum(kernel.measured_us is not None for kernel in kernels),
        of=len(kernels),
        roofs=measure.roofs(device_type, _dtype(kernels)),
        disturbed=load.disturbed if load is not None and device_type == "cpu" else None,
    )


def _milliseconds(call: Callable[[], Any], device_type: str) -> float:
    device.synchronize(device_type)
    return measure.first_call(call, device_type) * 1e3


def _profiled(call: Callable[[], Any], device_type: str) -> Iterable[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # The first events include the cost of starting the profiler.
    with torch.profiler.profile(activities=activities):
        call()
        device.synchronize(device_type)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(CALLS):
            call()
        device.synchronize(device_type)
    events: Iterable[Any] = profiler.events()
    return events


def attribute(events: Iterable[Any], device_type: str) -> tuple[EventTimes, Counter[str]]:
    """Return times of the events directly inside compiled graphs, and the number of runs of each graph."""
    times: EventTimes = {}
    runs: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event.time_range.start):
        entered = compat.profiler.entered_region(event)
        if entered is not None:
            runs[entered] += 1
        elif event.device_type.name == "CPU" and (graph := compat.profiler.region_of(event)) is not None:
            microseconds = event.device_time_total if device_type == "cuda" else event.cpu_time_total
            times.setdefault((graph, event.name), []).append(microseconds)
    return times, runs


def with_times(record: GraphRecord, times: EventTimes, runs: Counter[str]) -> GraphRecord:
    """Return a copy of a record with the measured times of its kernels."""
    count = runs[record.graph]
    # Indices of the kernels with each event name, in the order of their launches in one run.
    launched: dict[str, list[int]] = {}
    for index in _launches(record):
        launched.setdefault(_event_name(record.kernels[index]), []).append(index)
    of_kernel: dict[Hashable, list[float]] = {}
    for name, indices in launched.items():
        events = times.get((record.graph, name), [])
        if not count or len(events) != count * len(indices) or not any(events):
            continue
        # Runs do not overlap, so every `len(indices)`-th event belongs to the same kernel.
        for place, index in enumerate(indices):
            of_kernel.setdefault(_place(record, index), []).extend(events[place :: len(indices)])
    means = {key: round(statistics.fmean(values), 2) for key, values in of_kernel.items()}
    kernels = [
        dataclasses.replace(kernel, measured_us=means.get(_place(record, index)))
        for index, kernel in enumerate(record.kernels)
    ]
    return dataclasses.replace(record, kernels=kernels, runs=count / CALLS)


def _launches(record: GraphRecord) -> list[int]:
    """Return the indices of a record's kernels in launch order."""
    if not record.order:
        return list(range(len(record.kernels)))
    of_piece: dict[int | None, list[int]] = {}
    for index, kernel in enumerate(record.kernels):
        of_piece.setdefault(kernel.piece, []).append(index)
    return [index for piece in record.order for index in of_piece.get(piece, ())]


def _place(record: GraphRecord, index: int) -> Hashable:
    """Return the key of a launch; it is shared by the launches of a generated kernel in one piece."""
    kernel = record.kernels[index]
    return (kernel.piece, kernel.name) if kernel.kind == "generated" else index


def _event_name(kernel: Kernel) -> str:
    # Names of called operators also contain sizes.
    return kernel.name if kernel.name.isidentifier() else kernel.ops[0].replace(".", "::", 1)


def _dtype(kernels: Iterable[Kernel]) -> torch.dtype:
    """Return the dtype with the most floating-point operations."""
    flops: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.flops and kernel.dtype:
            flops[kernel.dtype] += kernel.flops
    dtype = getattr(torch, flops.most_common(1)[0][0]) if flops else torch.float32
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
