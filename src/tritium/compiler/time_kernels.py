"""Measure what each recorded kernel takes: profile some calls and give every event to the kernel it ran.

Generated kernels are found by name. Operators that generated code calls (products, attention, owned ops) carry no name of
their own: the profiler sees them in the order in which the graph calls them. Where the numbers of events and recorded
calls differ, nothing is attributed: such kernels stay unmeasured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tritium import compat, device, measure
from tritium.report import GraphRecord, Measurement

# Calls under the profiler, after one that warms it up.
CALLS = 3

# (graph, event's name) -> microseconds of every event, in the order they happened.
Found = dict[tuple[str, str], list[float]]


def time_kernels(records: Sequence[GraphRecord], call: Callable[[], Any]) -> tuple[list[GraphRecord], Measurement]:
    """The records with `measured_us` in their kernels (copies: the records themselves stay as they are)."""
    types = {record.device_type for record in records}
    device_type = "cuda" if "cuda" in types else "cpu"
    meter = measure.LoadMeter()
    plain = [_milliseconds(call, device_type) for _ in range(CALLS)]
    names = {kernel["name"] for record in records for kernel in record.kernels if kernel.get("kind") == "generated"}
    with compat.visible_kernels(names):
        found, runs = attribute(_profiled(call, device_type), device_type)
    load = meter.read()
    timed = [_timed(record, found, runs) for record in records]
    kernels = [kernel for record in timed if record.runs for kernel in record.kernels]
    return timed, Measurement(
        calls=CALLS,
        call_ms=statistics.median(plain),
        timed=sum(kernel["measured_us"] is not None for kernel in kernels),
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
    # The profiler's first events carry what starting it costs.
    with torch.profiler.profile(activities=activities):
        call()
        device.synchronize(device_type)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(CALLS):
            call()
        device.synchronize(device_type)
    events: Iterable[Any] = profiler.events()
    return events


def attribute(events: Iterable[Any], device_type: str) -> tuple[Found, Counter[str]]:
    """The events that lie directly in a compiled graph, and how often each graph ran."""
    found: Found = {}
    runs: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event.time_range.start):
        entered = compat.entered_region(event)
        if entered is not None:
            runs[entered] += 1
        elif event.device_type.name == "CPU" and (graph := compat.region_of(event)) is not None:
            taken = event.device_time_total if device_type == "cuda" else event.cpu_time_total
            found.setdefault((graph, event.name), []).append(taken)
    return found, runs


def _timed(record: GraphRecord, found: Found, runs: Counter[str]) -> GraphRecord:
    count = runs[record.graph]
    generated: dict[str, float] = {}
    called: dict[str, list[float]] = {}
    expected = Counter(_event_name(kernel) for kernel in record.kernels)
    for name, launches in expected.items():
        times = found.get((record.graph, name), [])
        if not count or len(times) != count * launches or not any(times):
            continue
        generated[name] = statistics.fmean(times)
        # The calls of one run follow each other: every `launches`-th event is the same one again.
        called[name] = [statistics.fmean(times[place::launches]) for place in range(launches)]
    kernels = []
    for kernel in record.kernels:
        name = _event_name(kernel)
        taken = generated.get(name)
        if taken is not None and kernel.get("kind") != "generated":
            taken = called[name].pop(0)
        kernels.append({**kernel, "measured_us": round(taken, 2) if taken is not None else None})
    return dataclasses.replace(record, kernels=kernels, runs=count / CALLS)


def _event_name(kernel: dict[str, Any]) -> str:
    if kernel.get("kind") == "generated":
        return str(kernel["name"])
    return str(kernel["ops"][0]).replace(".", "::", 1)


def _dtype(kernels: Iterable[dict[str, Any]]) -> torch.dtype:
    """The dtype in which most of the arithmetic happens."""
    flops: Counter[str] = Counter()
    for kernel in kernels:
        if kernel["flops"] and kernel["dtype"]:
            flops[kernel["dtype"]] += kernel["flops"]
    found = getattr(torch, flops.most_common(1)[0][0]) if flops else torch.float32
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32
