"""Decide per bucket whether a capture pays, from events around ordinary calls.

A capture removes kernel launches, so it pays if the device waits for the host to issue them. Under `graphs="auto"` a
bucket passes these stages. They only use the caller's calls, and nothing waits for the device:

1. the first call runs uncaptured: kernels are loaded and libraries are initialised
2. `TIMED_CALLS` calls run between two events. If most of them began while the device was busy, or if the host issued
   them in much less time than the device needed, the bucket stays uncaptured
3. otherwise the bucket is captured and `TIMED_CALLS` replays are timed. A replay saves the time in which the device was
   idle; if that is less than `WORTH_IT` of a call, the capture is dropped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from tritium.report.records import PassRecord

# Minimum share of a call in which the device is idle. Below it, a replay gains less than noise: FLUX at 1024 pixels
# never waits, SANA at 512 waits most of the time.
WORTH_IT = 0.05

TIMED_CALLS = 3

# If the host needs less than this share of the device's time to issue a call, the device never waits for it.
MAY_WAIT = 0.5

# Calls of a bucket until its decision: the first call, the timed calls, the timed replays (the first of which also
# captures), and one more call that finds all of them completed.
CALLS_TO_DECIDE = 2 + 2 * TIMED_CALLS

PREFIX = "graphs='auto': "

UNDECIDED = f"{PREFIX}not decided yet, ordinary calls are timed first"


@dataclass(frozen=True)
class Sample:
    """One timed call: CUDA events around it, the host's time to issue it, and if the device was idle before."""

    start: Any
    end: Any
    host_ms: float
    began_idle: bool

    @property
    def device_ms(self) -> float:
        return float(self.start.elapsed_time(self.end))

    @property
    def may_wait(self) -> bool:
        return self.began_idle and self.host_ms >= MAY_WAIT * self.device_ms


def sampled(device: torch.device, run: Callable[[], Any]) -> tuple[Sample, Any]:
    """Run between two events on the caller's stream."""
    stream = torch.cuda.current_stream(device)
    began_idle = bool(stream.query())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    begun = time.perf_counter()
    result = run()
    host_ms = (time.perf_counter() - begun) * 1e3
    end.record(stream)
    return Sample(start, end, host_ms, began_idle), result


class Decision:
    """The decision whether one bucket is captured, shared by all sets of weights."""

    def __init__(self, report: Callable[[Decision], None]) -> None:
        self._report = report
        self._began = False
        self._calls: list[Sample] = []
        self._replays: list[Sample] = []
        # The reason against a capture, or the figures in favour of it; both None until the decision is final.
        self.declined: str | None = None
        self.why: str | None = None

    @property
    def is_settled(self) -> bool:
        return self.declined is not None or self.why is not None

    def wants_capture(self) -> bool:
        """Return True once timed calls show that the device may wait for the host."""
        if self.is_settled or not _are_done(self._calls):
            return self.why is not None
        if 2 * sum(sample.may_wait for sample in self._calls) > len(self._calls):
            return True
        busy = sum(not sample.began_idle for sample in self._calls)
        host = min(sample.host_ms for sample in self._calls)
        taken = min(sample.device_ms for sample in self._calls)
        self.settle(
            declined=f"the device does not wait for the host: {busy} of {len(self._calls)} calls began while it was busy, "
            f"and the host issues a call in {host:.2f} of {taken:.2f} ms"
        )
        return False

    def call(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run an ordinary call, and time it if the decision needs it."""
        if not self._began:
            self._began = True
            return run()
        return self._timed(self._calls, device, run)

    def replay(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run a replay, and time it if the decision needs it."""
        if not self.is_settled and _are_done(self._replays):
            self._judge_replays()
        return self._timed(self._replays, device, run)

    def _timed(self, samples: list[Sample], device: torch.device, run: Callable[[], Any]) -> Any:
        if self.is_settled or len(samples) == TIMED_CALLS:
            return run()
        sample, result = sampled(device, run)
        samples.append(sample)
        return result

    def _judge_replays(self) -> None:
        called = min(sample.device_ms for sample in self._calls if sample.may_wait)
        replayed = min(sample.device_ms for sample in self._replays)
        share = max(0.0, 1.0 - replayed / called) if called > 0 else 0.0
        figures = f"the device was idle for {share * 100:.0f} % of a call ({called:.2f} ms, {replayed:.2f} ms replayed)"
        if share < WORTH_IT:
            self.settle(declined=f"{figures}: less than {WORTH_IT * 100:.0f} %")
        else:
            self.settle(why=figures)

    def settle(self, *, declined: str | None = None, why: str | None = None) -> None:
        """Make the decision final, with the reason against a capture or the figures in favour of it."""
        self.declined = f"{PREFIX}{declined}" if declined is not None else None
        self.why = why
        self._calls.clear()
        self._replays.clear()
        self._report(self)


def _are_done(samples: list[Sample]) -> bool:
    return len(samples) == TIMED_CALLS and all(sample.end.query() for sample in samples)


class Decisions:
    """The decisions of one graph's regions, and their summary in the report."""

    def __init__(self, entry: PassRecord) -> None:
        self._entry = entry
        self._before = entry.summary
        self._by_bucket: dict[Hashable, Decision] = {}
        # The distinct results: a graph can have many pieces and shapes, each with a separate decision.
        self._results: dict[str, None] = {}

    def of(self, bucket: Hashable) -> Decision:
        """Return the decision for a bucket; create it on the first call."""
        return self._by_bucket.setdefault(bucket, Decision(self._tell))

    def _tell(self, decision: Decision) -> None:
        self._results[(decision.why or decision.declined or "").removeprefix(PREFIX)] = None
        text = PREFIX + "; ".join(self._results)
        captured = any(known.why is not None for known in self._by_bucket.values())
        self._entry.changed = captured
        self._entry.summary = "; ".join(filter(None, [self._before, text if captured else None])) or None
        self._entry.declined = None if captured else text
