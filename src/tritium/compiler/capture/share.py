"""Whether capturing pays, measured: graphs remove launches, so they help as far as the device waits for them.

`graphs="auto"` runs the first bucket a few times, and compares how long its kernels take with how long the call takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tritium import turns
from tritium.compiler.capture.region import Decide
from tritium.report import PassRecord

# The share of a call that the device must wait for the host. Below it, replaying gains less than noise; FLUX at 1024
# pixels waits for nothing, SANA at 512 most of the time.
WORTH_IT = 0.05

# Untimed calls first: the stream may be another than the one that was warmed up.
WARM_UPS = 2

# How often a number of calls in a row is timed.
ROUNDS = 5
CALLS = 10


def idle_share(busy_us: float, elapsed_us: float) -> float:
    """The part of a call in which the device does nothing.

    >>> idle_share(300.0, 1000.0)
    0.7
    """
    if elapsed_us <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - busy_us / elapsed_us))


def verdict(busy_us: float, elapsed_us: float) -> tuple[bool, str]:
    """Whether to capture, and the figures behind it.

    >>> verdict(990.0, 1000.0)
    (False, 'the device is idle for 1 % of a call (0.99 of 1.00 ms busy): less than 5 %')
    """
    share = idle_share(busy_us, elapsed_us)
    figures = f"the device is idle for {share:.0%} of a call ({busy_us / 1e3:.2f} of {elapsed_us / 1e3:.2f} ms busy)"
    figures = figures.replace("%", " %")
    if share < WORTH_IT:
        return False, f"{figures}: less than {WORTH_IT:.0%}".replace("5%", "5 %")
    return True, figures


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """The time in which at least one of some intervals runs: kernels of two streams overlap.

    >>> busy_us([(0.0, 10.0), (5.0, 12.0), (20.0, 21.0)])
    13.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def measure(run: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds that the device is busy in a call, and that a call takes when calls follow one another.

    Others may use the host and the device meanwhile, which makes calls longer and kernels hardly: so the shortest of
    several rounds counts, of those that this process had the device's turn for.
    """
    with turns.turn("cuda"):
        for _ in range(WARM_UPS):
            run()
        elapsed = min(_elapsed_us(run) for _ in range(ROUNDS))
        return _busy_us(run), elapsed


def _elapsed_us(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / CALLS


def _busy_us(run: Callable[[], Any]) -> float:
    # Only the kernels' own times are taken from here: the profiler slows the host down.
    profiler: Any = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name == "CUDA"]
    return busy_us(spans) / CALLS


def decision(entry: PassRecord, measured: Callable[[Callable[[], Any]], tuple[float, float]] = measure) -> Decide:
    """What each region of a graph asks on its first bucket; the figures go into the report."""
    cut, said, captured = entry.summary, [], []

    def decide(run: Callable[[], Any]) -> str | None:
        try:
            worth, why = verdict(*measured(run))
        except RuntimeError as error:
            # Another profiler is at work, for one.
            worth, why = False, f"the share of idle time cannot be measured ({str(error).splitlines()[0]})"
        said.append(why)
        captured.append(worth)
        told = f"graphs='auto': {'; '.join(said)}"
        # A graph that is cut has a region for each piece, and each its own answer.
        entry.changed = any(captured)
        entry.summary = (f"{cut}; {told}" if cut else told) if entry.changed else cut
        entry.declined = None if entry.changed else told
        return None if worth else f"graphs='auto': {why}"

    return decide
