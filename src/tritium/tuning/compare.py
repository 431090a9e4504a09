"""Compare providers: time them interleaved, and pick the fastest unless another is preferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tritium import measure

# A function that is slower than the fastest by this factor in its first calls is not timed further.
HOPELESS = 2.0


def faster(ms: Mapping[str, float], preferred: str | None, margin: float) -> str:
    """Return the fastest name, or the preferred one unless another is faster by more than the margin.

    >>> faster({"sdpa": 1.01, "cudnn": 1.0}, "sdpa", 0.02), faster({"sdpa": 1.03, "cudnn": 1.0}, "sdpa", 0.02)
    ('sdpa', 'cudnn')
    """
    best = min(ms, key=ms.__getitem__)
    if preferred is not None and ms.get(preferred, math.inf) <= ms[best] * (1 + margin):
        return preferred
    return best


def timed(runs: Mapping[str, Callable[[], Any]], device_type: str) -> dict[str, float]:
    """Return the median ms of interleaved runs; much slower ones (`HOPELESS`) run only briefly."""
    first = measure.interleave(runs, device_type, rounds=2, warmup=1)
    limit = HOPELESS * min(timing.median_ms for timing in first.values())
    close = {name: run for name, run in runs.items() if first[name].median_ms <= limit}
    rounds = measure.cycle(len(close)) * max(1, 6 // measure.cycle(len(close)))
    again = measure.interleave(close, device_type, rounds=rounds, warmup=0, burst=5 if device_type == "cuda" else 1)
    return {name: (again if name in again else first)[name].median_ms for name in runs}
