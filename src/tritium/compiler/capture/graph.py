"""Device graphs: `torch.cuda.CUDAGraph`, or an equally strict emulation on a CPU."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tritium import compat
from tritium.compat.tensors import storage_id
from tritium.compiler.capture.inputs import Buffers, without_repeats
from tritium.compiler.capture.outputs import over
from tritium.device import is_capturing
from tritium.errors import CaptureRefused

# Libraries must be initialised and kernels tuned before a capture begins. The documentation of CUDA and torch use three
# runs.
WARM_UPS = 3

# A call with static arguments; it returns the call's results, or none if it stores them itself.
Run = Callable[[], Sequence[Any]]


class DeviceGraph(Protocol):
    """A captured call: reads its static inputs and weights, writes its results."""

    def replay(self) -> None: ...


class EmulatedGraph:
    """Run a call again on the captured arguments, and write into the captured results.

    A replay overwrites the results of other graphs in the pool: on a GPU its intermediate values could be there.
    """

    def __init__(
        self,
        run: Run,
        results: Sequence[Any],
        pool: weakref.WeakSet[EmulatedGraph],
        shared: Sequence[torch.Tensor] = (),
    ) -> None:
        self._run = run
        self._pool = pool
        # The memory of results that other graphs use too.
        self._shared = shared
        self._static = results
        # Results outside of the arguments' memory; known after a replay.
        self._own: list[torch.Tensor] = []
        pool.add(self)

    def replay(self) -> None:
        for other in list(self._pool):
            if other is not self:
                other.spoil()
        self._own = []
        for new, static in zip(self._run(), self._static, strict=True):
            if isinstance(static, torch.Tensor) and new.data_ptr() != static.data_ptr():
                without_repeats(static).copy_(without_repeats(new))
                self._own.append(static)

    # inference_mode: results created in inference mode cannot be written to outside of it.
    @torch.inference_mode()
    def spoil(self) -> None:
        for tensor in self._own:
            if tensor.is_floating_point():
                without_repeats(tensor).fill_(float("nan"))


class Lane:
    """A device that runs one capture at a time, because all its captures share a memory pool.

    This one emulates CUDA's graphs on a CPU: the same rules for memory, but no speed-up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.buffers = Buffers()
        # Memory of results that no capture keeps.
        self._free = Buffers()
        self._graphs: weakref.WeakSet[EmulatedGraph] = weakref.WeakSet()

    def order(self) -> None:
        """Make the caller's stream wait for an earlier caller's stream, because both use the shared memory."""

    def warm_up(self, run: Run) -> Sequence[Any]:
        """Call a few times and return the last result."""
        for _ in range(WARM_UPS - 1):
            run()
        return run()

    def capture(
        self, run: Run, generators: Sequence[torch.Generator], arguments: Sequence[Any] | None = None
    ) -> tuple[DeviceGraph, Sequence[Any]]:
        """Capture a call; return the graph and the memory that its replays write results into.

        Other captures may use parts of that memory while it is free, so any other replay may overwrite it. With
        `arguments`, the results outside of their memory are given up: all captures write theirs into the same memory.
        """
        del generators
        results = run()
        shared: list[torch.Tensor] = []

        def take(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            like = torch.empty(storage.nbytes(), dtype=torch.uint8)
            occurrence = Counter(buffer.numel() for buffer in shared)[storage.nbytes()]
            shared.append(self._free.take(like, occurrence)[0])
            return shared[-1].untyped_storage()

        if arguments is not None:
            results = _given_up(results, arguments, take)
        return EmulatedGraph(run, results, self._graphs, shared), results

    def retire(self, things: Any) -> None:
        """Free graphs and their memory as soon as the device has finished using them."""
        del things

    def memory(self) -> int:
        """Return the bytes reserved by the device's allocator."""
        return 0

    @contextlib.contextmanager
    def unchanged(self, generators: Sequence[torch.Generator], written: Sequence[torch.Tensor]) -> Iterator[None]:
        """Undo side effects of the runs inside: restore random states and the memory that they write to."""
        states = [generator.get_state() for generator in generators]
        values = [tensor.clone() for tensor in written]
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for tensor, value in zip(written, values, strict=True):
                tensor.copy_(value)


class CudaLane(Lane):
    """A GPU with its memory pool."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool: Any = None
        # An empty graph, which keeps the pool alive.
        self._anchor: Any = None
        self._last: Any = None
        self._is_capturing = False
        self._retired: list[Any] = []

    @functools.cached_property
    def _side(self) -> Any:
        return torch.cuda.Stream(self.device)

    def order(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def warm_up(self, run: Run) -> Sequence[Any]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                result = super().warm_up(run)
            current.wait_stream(self._side)
        return result

    def capture(
        self, run: Run, generators: Sequence[torch.Generator], arguments: Sequence[Any] | None = None
    ) -> tuple[DeviceGraph, Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self.device), compat.capture.fresh_cublas_workspaces():
            results = self._captured(graph, run)
        if arguments is not None:
            # The next capture allocates the same memory, which stays with the pool.
            results = _given_up(results, arguments, compat.capture.without_owner)
        return graph, results

    def _captured(self, graph: Any, run: Run) -> Sequence[Any]:
        failure: Exception | None = None
        self._is_capturing = True
        try:
            if self._pool is None:
                self._start_pool()
            with self._into(graph):
                try:
                    return run()
                except Exception as error:
                    failure = error
                    raise
        except BaseException:
            # The default generator still assumes the failed capture and generates no numbers; a successful capture, that
            # of a new pool, resets it.
            self._pool = self._anchor = None
            with contextlib.suppress(RuntimeError):
                self._start_pool()
            if failure is not None:
                # Ending a broken capture raises another, less helpful error.
                raise failure from None
            raise
        finally:
            self._is_capturing = False

    def _start_pool(self) -> None:
        """Create a pool. It lives as long as a graph uses it, so an empty graph keeps it alive."""
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self._into(self._anchor):
                pass

    @contextlib.contextmanager
    def _into(self, graph: Any) -> Iterator[None]:
        # After a failed capture torch leaves its stream current; the outer context restores the caller's. In mode
        # thread_local, other threads may use the device during the capture.
        with (
            torch.cuda.stream(self._side),
            torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"),
        ):
            yield

    def retire(self, things: Any) -> None:
        # A replay may still run on a stream that does not own the memory, so synchronize before freeing. That would
        # break a capture: during one, keep the things until the next call.
        self._retired.append(things)
        if not self._is_capturing and not is_capturing():
            torch.cuda.synchronize(self.device)
            self._retired.clear()

    def memory(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def _given_up(
    results: Sequence[Any], arguments: Sequence[Any], replace: Callable[[torch.UntypedStorage], torch.UntypedStorage]
) -> list[Any]:
    """Return results over other memory for the same, except those in the memory of arguments."""
    kept = {storage_id(arg) for arg in arguments if isinstance(arg, torch.Tensor)}
    storages: dict[int, torch.UntypedStorage] = {}

    def given_up(result: Any) -> Any:
        # A tensor subclass is refused later.
        if type(result) not in (torch.Tensor, torch.nn.Parameter) or (key := storage_id(result)) in kept:
            return result
        if key not in storages:
            storages[key] = replace(result.untyped_storage())
        return over(result, storages[key])

    return [given_up(result) for result in results]


@functools.cache
def lane_of(device: torch.device) -> Lane:
    """Return the lane of a device, shared by all regions of the process."""
    lanes = {"cpu": Lane, "cuda": CudaLane}
    if device.type not in lanes:
        raise CaptureRefused(f"there are no static graphs on {device.type!r}")
    return lanes[device.type](device)
