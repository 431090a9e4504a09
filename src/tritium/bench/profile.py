"""Profile a call: its kernels on a GPU, or the sum of its operators and kernels on any device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat, device

# Calls under the profiler; a kernel's time is the mean over them. The run is short, so the clock is higher than under
# sustained load, and the sum is less than the time of a sustained call.
CALLS = 5

# The profiler's event around each call. A CPU's time is the median over calls: other processes disturb some of them.
_CALL = "one call"

# Kernels that are kept by name; the others are summed.
KEPT = 40


def profile(call: Callable[[], Any], device_type: str) -> list[dict[str, Any]] | None:
    """Return the kernels of one call, longest first; None without a GPU."""
    return summarise(_kernels(call)) if device_type == "cuda" else None


def operator_time(call: Callable[[], Any], device_type: str) -> float:
    """Return the microseconds that one call spends in operators and kernels.

    On a GPU these are the kernels' times. On a CPU they are the operators' own times, dispatch included, and for a
    compiled graph what it takes outside of operators: its kernels and the code that launches them.
    """
    if device_type == "cuda":
        # A kernel runs after the call that launched it: only the sum is known.
        return sum(map(sum, _kernels(call).values())) / CALLS
    events = _events(call, torch.profiler.ProfilerActivity.CPU)
    totals = []
    for whole in (event.time_range for event in events if event.name == _CALL):
        inside = (event for event in events if whole.start <= event.time_range.start < whole.end)
        totals.append(sum(event.self_cpu_time_total for event in inside if compat.profiler.is_work(event.name)))
    return float(statistics.median(totals))


def _kernels(call: Callable[[], Any]) -> dict[str, list[float]]:
    """Return the microseconds of every kernel of `CALLS` calls on a GPU, by name."""
    found: dict[str, list[float]] = {}
    for event in _events(call, torch.profiler.ProfilerActivity.CUDA):
        if event.device_type.name == "CUDA":
            found.setdefault(event.name, []).append(float(event.device_time))
    return found


def _events(call: Callable[[], Any], activity: torch.profiler.ProfilerActivity) -> Any:
    for _ in range(3):
        call()
    where = "cpu" if activity == torch.profiler.ProfilerActivity.CPU else "cuda"
    device.synchronize(where)
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(CALLS):
            with torch.profiler.record_function(_CALL):
                call()
        device.synchronize(where)
    return profiler.events()


def summarise(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Per call and kernel name, the short tail in one line.

    >>> summarise({"gemm": [10.0] * 10, "norm": [1.0] * 5})
    [{'name': 'gemm', 'calls': 2.0, 'us': 20.0}, {'name': 'norm', 'calls': 1.0, 'us': 1.0}]
    """
    rows: list[dict[str, Any]] = [
        {"name": name, "calls": len(times) / CALLS, "us": round(sum(times) / CALLS, 2)} for name, times in found.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    kept, rest = rows[:KEPT], rows[KEPT:]
    if rest:
        calls, us = (sum(row[name] for row in rest) for name in ("calls", "us"))
        kept.append({"name": f"{len(rest)} others", "calls": calls, "us": round(us, 2)})
    return kept
