"""The device's graph: `torch.cuda.CUDAGraph`, or on a CPU an emulation that is as strict.

A `Lane` is what runs one recording at a time: a device with the memory pool that all its recordings share.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tritium.compat import capture as compat_capture
from tritium.compiler.capture.inputs import Buffers, without_repeats
from tritium.compiler.capture.outputs import flatten
from tritium.device import is_capturing
from tritium.errors import CaptureRefused

# Lazy initialisation of libraries and the tuning of kernels must be over before a recording begins; CUDA's own
# documentation and torch's use three runs.
WARM_UPS = 3


class DeviceGraph(Protocol):
    """A recording: reads the static inputs and weights it saw, writes the results it returned."""

    def replay(self) -> None: ...


class Mark(Protocol):
    """A place in a stream, and when the device reached it."""

    def is_done(self) -> bool:
        """Whether the device has reached it; waits for nothing."""

    def until(self, later: Any) -> float:
        """Milliseconds to a later mark; both are done."""


class Lane(Protocol):
    """A device on which recordings run one after the other."""

    lock: threading.RLock
    buffers: Buffers

    def order(self) -> None:
        """Let what follows on the caller's stream wait for what an earlier caller's stream still does with shared memory."""

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Call a few times; returns what the last call returned."""

    def record(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, Any]:
        """Record a call; returns the recording and the memory that its replays write results into.

        That memory is free at times while other calls are recorded, and they use it: any other replay may overwrite it.
        """

    def retire(self, things: Any) -> None:
        """Let recordings and their memory go as soon as nothing can be using them any more."""

    def memory(self) -> int:
        """Bytes that the device's allocator has taken."""

    def is_idle(self) -> bool:
        """Whether the caller's stream has nothing left to do; waits for nothing."""

    def mark(self) -> Mark:
        """Mark the present end of the caller's stream."""


class EmulatedGraph:
    """Reruns a call on the arguments it was recorded with, and writes into the results it was recorded with.

    Its replay spoils the results of the others in its pool: a GPU's intermediate values lie anywhere in there.
    """

    def __init__(self, run: Callable[[], Any], pool: weakref.WeakSet[EmulatedGraph]) -> None:
        self._run = run
        self._pool = pool
        self.result = run()
        self._static = flatten(self.result)[0]
        # Results that are not memory of the arguments; known after a replay.
        self._own: list[torch.Tensor] = []
        pool.add(self)

    def replay(self) -> None:
        for other in list(self._pool):
            if other is not self:
                other.spoil()
        leaves, _ = flatten(self._run())
        if len(leaves) != len(self._static):
            raise RuntimeError("a replayed call returned another structure than the recorded one")
        self._own = []
        for new, static in zip(leaves, self._static, strict=True):
            if isinstance(static, torch.Tensor) and new.data_ptr() != static.data_ptr():
                without_repeats(static).copy_(without_repeats(new))
                self._own.append(static)

    # Results that were made in inference mode can be written to there alone.
    @torch.inference_mode()
    def spoil(self) -> None:
        for tensor in self._own:
            if tensor.is_floating_point():
                without_repeats(tensor).fill_(float("nan"))


class CpuMark:
    """A CPU has done everything by the time a call returns."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def until(self, later: CpuMark) -> float:
        return (later._seconds - self._seconds) * 1e3


class CpuLane:
    """The emulation: as right and as wrong as CUDA's graphs where memory is concerned, and never faster."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buffers = Buffers()
        self._pool: weakref.WeakSet[EmulatedGraph] = weakref.WeakSet()

    def order(self) -> None:
        pass

    def warm_up(self, run: Callable[[], Any]) -> Any:
        for _ in range(WARM_UPS - 1):
            run()
        return run()

    def record(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, Any]:
        del generators
        graph = EmulatedGraph(run, self._pool)
        result, graph.result = graph.result, None
        return graph, result

    def retire(self, things: Any) -> None:
        del things

    def memory(self) -> int:
        return 0

    def is_idle(self) -> bool:
        return True

    def mark(self) -> Mark:
        return CpuMark()


class CudaMark:
    """A CUDA event on the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        return bool(self._event.query())

    def until(self, later: CudaMark) -> float:
        return float(self._event.elapsed_time(later._event))


class CudaLane:
    """A GPU. Its recordings share one pool of memory, so no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.buffers = Buffers()
        self._device = device
        self._pool: Any = None
        self._anchor: Any = None
        self._side: Any = None
        self._last: Any = None
        self._recording = False
        self._retired: list[Any] = []

    def order(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def warm_up(self, run: Callable[[], Any]) -> Any:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = self._side_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS - 1):
                    run()
                result = run()
            current.wait_stream(side)
        return result

    def record(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[DeviceGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            compat_capture.register_generator(graph, generator)
        with torch.cuda.device(self._device), compat_capture.fresh_cublas_workspaces():
            return graph, self._recorded(graph, run)

    def _recorded(self, graph: Any, run: Callable[[], Any]) -> Any:
        failure: Exception | None = None
        result = None
        self._recording = True
        try:
            if self._pool is None:
                self._start_pool()
            with self._into(graph):
                try:
                    result = run()
                except Exception as error:
                    failure = error
                    raise
        except BaseException:
            self._recover()
            if failure is not None:
                # Ending a broken recording is an error too, which says less.
                raise failure from None
            raise
        finally:
            self._recording = False
        return result

    def _recover(self) -> None:
        """A pool that a recording broke off in is not used again.

        The default generator still believes in that recording and gives nobody numbers: one that succeeds tells it better.
        """
        self._pool = self._anchor = None
        with contextlib.suppress(RuntimeError):
            self._start_pool()

    def _start_pool(self) -> None:
        """A pool lives as long as some graph uses it: this empty one outlives all others, so that none is the last."""
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._into(self._anchor):
                pass

    @contextlib.contextmanager
    def _into(self, graph: Any) -> Iterator[None]:
        side = self._side_stream()
        # The outer one is for a recording that breaks off: torch leaves its stream current then. Other threads may go on
        # using the device meanwhile.
        with (
            torch.cuda.stream(side),
            torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            yield

    def retire(self, things: Any) -> None:
        # A replay on another stream than the one that owns the memory may still run. Waiting for it is for rare moments
        # only, and would break a recording: the things then wait for the next time.
        self._retired.append(things)
        if not self._recording and not is_recording():
            torch.cuda.synchronize(self._device)
            self._retired.clear()

    def memory(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def is_idle(self) -> bool:
        return bool(torch.cuda.current_stream(self._device).query())

    def mark(self) -> Mark:
        return CudaMark(self._device)

    def _side_stream(self) -> Any:
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        return self._side


@functools.cache
def lane_of(device: torch.device) -> Lane:
    """The lane of a device: one for all regions of the process."""
    if device.type == "cpu":
        return CpuLane()
    if device.type == "cuda":
        return CudaLane(device)
    raise CaptureRefused(f"there are no static graphs on {device.type!r}")


def is_recording() -> bool:
    """Whether somebody else records what this thread does: then there is nothing to replay in between."""
    return is_capturing()


@contextlib.contextmanager
def unchanged(
    device: torch.device, generators: Sequence[torch.Generator], written: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Runs inside leave no trace: random numbers and memory that they write to are as before."""
    states = [generator.get_state() for generator in generators]
    values = [tensor.clone() for tensor in written]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        for tensor, value in zip(written, values, strict=True):
            tensor.copy_(value)
