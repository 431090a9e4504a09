"""Timing: interleaved runs of warmed-up variants over a sustained period.

A processor lowers its clock under load, and the load of a shared machine varies. Variants are therefore timed in
turn, in balanced orders, until the time is up, and never one after the other.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from tritium import device

# With fewer samples, quartiles are meaningless.
MINIMUM_ROUNDS = 5

# Seconds to wait for the GPU before timing anyway: a process stopped while it holds the lock must not block others
# forever, and an overlapping timing is only less exact.
PATIENCE = 300.0

# Also true in a thread that runs in a copy of the holder's context, while the holder waits for that thread.
_HOLDS_GPU = contextvars.ContextVar("holds_gpu", default=False)

# Runs a function several times and returns the milliseconds of each run.
Stopwatch = Callable[[Callable[[], Any], int], list[float]]


@dataclass(frozen=True)
class Timing:
    """The times of repeated runs of one function, in milliseconds."""

    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    samples: int
    # The mean of the middle half: a median jumps if the device switches between two clocks.
    middle_ms: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return median and quartiles of samples, and the mean between the quartiles.

        >>> Timing.of([4.0, 1.0, 3.0, 2.0, 6.0])
        Timing(median_ms=3.0, lower_quartile_ms=2.0, upper_quartile_ms=4.0, samples=5, middle_ms=3.0)
        """
        if not samples:
            raise ValueError("no samples: nothing was timed")
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, samples[0])
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        outside = len(samples) // 4
        middle = sorted(samples)[outside : len(samples) - outside]
        return cls(median, lower, upper, len(samples), statistics.fmean(middle))


@contextlib.contextmanager
def gpu_lock(device_type: str, *, shared: bool = False) -> Iterator[None]:
    """Time on the GPU alone: other processes of this user and other threads wait. Reentrant; a CPU has no lock.

    Compiling leaves a GPU idle, so several benchmarks can run in parallel as long as their timings do not overlap. With
    `shared`, others may hold it as well if they share it: what is not timed waits for those that time.
    """
    if device_type != "cuda" or _HOLDS_GPU.get() or os.name != "posix":
        yield
        return
    deadline = time.monotonic() + PATIENCE
    with (Path(tempfile.gettempdir()) / f"tritium-{os.getuid()}-gpu.lock").open("a") as file:
        while _is_locked_elsewhere(file, shared=shared):
            if time.monotonic() > deadline:
                message = f"tritium: the GPU was measured on for {PATIENCE:g} s; timings may now be disturbed"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
                break
            time.sleep(0.02)
        token = _HOLDS_GPU.set(not shared)
        try:
            yield
        finally:
            _HOLDS_GPU.reset(token)


def _is_locked_elsewhere(file: IO[str], *, shared: bool) -> bool:
    """Lock a file for this handle; return True if another handle of any process has it locked."""
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The file system does not support locks.
        pass
    return False


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    device_type: str,
    *,
    seconds: float | None = None,
    rounds: int | None = None,
    warmup: int = 2,
    burst: int = 1,
    stopwatch: Stopwatch | None = None,
    prepare: Callable[[str], None] | None = None,
    on_round: Callable[[float], None] | None = None,
) -> dict[str, Timing]:
    """Time variants by interleaving their runs.

    Args:
        variants: Functions by name. Each must do the same work on every call.
        device_type: `cuda` is timed with device events, everything else with the host's clock.
        seconds: Time for at least this long, until each variant has run equally often at each place in the order.
        rounds: Time exactly this many rounds, instead of `seconds`.
        warmup: Untimed calls of each variant before the first round.
        burst: Timed calls of a variant per round; each is a sample.
        stopwatch: Replaces the timer of the device type.
        prepare: Called with the variant's name before it is timed, for variants that share state.
        on_round: Called after each round with the completed share of the work.
    """
    if not variants:
        raise ValueError("nothing to time: variants is empty")
    if (seconds is None) == (rounds is None):
        raise ValueError("say either seconds or rounds")
    stopwatch, names = stopwatch or stopwatch_for(device_type), list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with gpu_lock(device_type):
        for name in names * warmup:
            if prepare is not None:
                prepare(name)
            variants[name]()
        device.synchronize(device_type)

        start, done = time.perf_counter(), 0
        while True:
            for name in order_of_round(names, done):
                if prepare is not None:
                    prepare(name)
                    # Exclude work that `prepare` queued on the device.
                    device.synchronize(device_type)
                samples[name] += stopwatch(variants[name], burst)
            done += 1
            elapsed = time.perf_counter() - start
            share = done / rounds if rounds else min(1.0, elapsed / seconds) if seconds else 1.0
            if on_round is not None:
                on_round(share)
            balanced = done >= MINIMUM_ROUNDS and done % cycle(len(names)) == 0
            if share >= 1 and (rounds or balanced):
                return {name: Timing.of(taken) for name, taken in samples.items()}


def balanced_rounds(variants: int) -> int:
    """Return the least number of rounds in which each variant runs equally often at each place in the order."""
    return -(-MINIMUM_ROUNDS // cycle(variants)) * cycle(variants)


def order_of_round(names: Sequence[str], done: int) -> list[str]:
    """Return the order of one round.

    These are the orders of a Williams design: over `cycle(len(names))` rounds, each variant follows each other one
    equally often. Plain rotation would be unfair: a variant that always follows the cheapest one always runs on a cool
    device.

    >>> [order_of_round("abcd", done) for done in range(4)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd'], ['c', 'd', 'b', 'a'], ['d', 'a', 'c', 'b']]
    """
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    turn = done % cycle(count)
    order = [names[(place + turn) % count] for place in zigzag]
    return order if turn < count else order[::-1]


def cycle(variants: int) -> int:
    """Return the number of rounds after which the orders repeat.

    >>> [cycle(variants) for variants in (1, 2, 3, 4)]
    [1, 2, 6, 4]
    """
    return variants if variants % 2 == 0 or variants == 1 else 2 * variants


def stopwatch_for(device_type: str) -> Stopwatch:
    return _device_events if device_type == "cuda" else _host_clock


def _host_clock(run: Callable[[], Any], calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def _device_events(run: Callable[[], Any], calls: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    # Synchronize once per burst: after every call it would empty the queue and add host time.
    torch.cuda.synchronize()
    return [float(start.elapsed_time(end)) for start, end in pairs]


def first_call(run: Callable[[], Any], device_type: str) -> float:
    """Return the seconds of one call, device time included; a first call is mostly compilation."""
    device.synchronize(device_type)
    start = time.perf_counter()
    run()
    device.synchronize(device_type)
    return time.perf_counter() - start


def peak_memory(run: Callable[[], Any], device_type: str) -> int | None:
    """Return the peak bytes while a function runs, weights included, or None if unknown.

    On a GPU: bytes allocated by torch. On a CPU: resident bytes of the whole process, libraries included.
    """
    if device_type != "cuda":
        if not device.forget_peak_memory():
            return None
        run()
        return device.peak_memory_of_process()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def allocated_bytes(device_type: str) -> int:
    """Return the bytes that torch holds on a GPU; 0 on a CPU, where torch does not count them."""
    return torch.cuda.memory_allocated() if device_type == "cuda" else 0


@dataclass(frozen=True)
class Roofs:
    """A device's limits: bytes per second of a large copy, operations per second of a large product."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str


# A copy larger than every cache, and a compute-bound product that takes about 30 ms on a small machine.
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


def roofs(device_type: str, dtype: torch.dtype, runs: int = 5) -> Roofs:
    """Measure both limits, each as the best of several runs."""
    where = device_type if device_type in _COPIED_BYTES else "cpu"
    source = torch.ones(_COPIED_BYTES[where], dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), where, runs)
    return Roofs(2 * source.numel() / copied, product_rate(where, dtype, runs), str(dtype).removeprefix("torch."))


def product_rate(where: str, dtype: torch.dtype, runs: int = 5) -> float:
    """Return the operations a second of a large product, as the best of several runs."""
    size = _PRODUCT_SIZE[where]
    left = torch.ones(size, size, dtype=dtype, device=where)
    out = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, left, out=out), where, runs)


def _best(run: Callable[[], Any], where: str, runs: int) -> float:
    run()
    return min(stopwatch_for(where)(run, runs)) / 1e3


# Sizes of the copies that measure a link: the difference of their times has no launch in it.
_LINK_BYTES = (1 << 26, 1 << 28)


def link_rate(where: torch.device, runs: int = 3) -> float:
    """Return the bytes a second from page-locked memory to a GPU, from copies of two sizes."""
    source = torch.empty(_LINK_BYTES[1], dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=where, pin_memory=False)
    with torch.cuda.device(where), gpu_lock(where.type):
        seconds = []
        for size in _LINK_BYTES:

            def copy(size: int = size) -> None:
                target[:size].copy_(source[:size], non_blocking=True)

            copy()
            seconds.append(min(_device_events(copy, runs)) / 1e3)
    low, high = _LINK_BYTES
    return (high - low) / max(seconds[1] - seconds[0], 1e-9)


@dataclass(frozen=True)
class Load:
    """The load of the cores during a timing, from this process and from others."""

    own_cores: float
    foreign_cores: float
    usable_cores: int

    @property
    def disturbed(self) -> bool:
        """True if other processes disturbed the timing.

        Threads that wait for each other after every parallel loop suffer most: one foreign thread on two cores made a
        model 30 times slower. It did so evenly, so the quartiles do not show it.
        """
        return self.foreign_cores > 0.1 and self.own_cores + self.foreign_cores > 0.9 * self.usable_cores


class LoadMeter:
    """Measure load from creation until `read`."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time(), device.busy_cpu_seconds()

    def read(self) -> Load | None:
        """Return the load so far, or None if the system does not report it."""
        start, own_start, busy_start = self._start
        busy = device.busy_cpu_seconds()
        if busy is None or busy_start is None:
            return None
        seconds = time.perf_counter() - start
        own = time.process_time() - own_start
        return Load(own / seconds, max(0.0, busy - busy_start - own) / seconds, device.usable_cores())


def relative_l2(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of the reference, both in float64.

    >>> relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} against {tuple(reference.shape)}")
    wide = torch.complex128 if actual.is_complex() or reference.is_complex() else torch.float64
    expected = reference.detach().to(wide)
    difference = float(torch.linalg.vector_norm(actual.detach().to(wide) - expected))
    norm = float(torch.linalg.vector_norm(expected))
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm
