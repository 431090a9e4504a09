"""Where the time of a call goes on a GPU: its kernels, how often each runs and how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Calls under the profiler; a kernel's time is the mean over them. They follow each other closely, but not for long: the
# clock is higher than under sustained load, so these times add up to less than a sustained call takes.
CALLS = 5

# Kernels that are kept by name; what the others take is added up.
KEPT = 40


def profile(call: Callable[[], Any], device_type: str) -> list[dict[str, Any]] | None:
    """The kernels of one call, longest first; None where there is no device to profile."""
    if device_type != "cuda":
        return None
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            found.setdefault(event.name, []).append(event.device_time)
    return summarise(found)


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
