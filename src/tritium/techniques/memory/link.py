"""Copy weights from the host to a device on a separate stream.

`Link` emulates it on a CPU, as captures are emulated: a thread copies, and memory holds NaN until a copy arrives.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tritium import compat, device, measure
from tritium.techniques.memory.units import writing

# What stays free on the host: page-locked memory cannot be reclaimed.
_LEFT, _LEFT_SHARE = 2 * 2**30, 0.05


class Moment:
    """A point in the work of an emulated stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.at = 0.0

    def reach(self) -> None:
        self.at = time.perf_counter()
        self._passed.set()

    def wait(self) -> None:
        self._passed.wait()

    def query(self) -> bool:
        return self._passed.is_set()

    def elapsed_time(self, end: Moment) -> float:
        return (end.at - self.at) * 1e3


class Link:
    """Copies to one device, one after another. This one emulates them on a CPU."""

    def __init__(self, where: torch.device) -> None:
        self.device = where
        self._held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- memory ---

    def allocate(self, size: int) -> torch.Tensor:
        """Return bytes on the device."""
        with writing():
            buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)
        self._held.add(buffer)
        return buffer

    def allocated(self) -> int:
        """Return the bytes that PyTorch holds on the device."""
        return sum(buffer.numel() for buffer in self._held)

    def most_allocated(self) -> int:
        """Return the most bytes that PyTorch held on the device so far."""
        return 0

    def capacity(self) -> int | None:
        """Return the bytes that PyTorch can hold on the device; None if unknown."""
        free = device.free_memory(self.device)
        return None if free is None else free + self.allocated()

    def host(self, size: int) -> torch.Tensor:
        """Return bytes on the host, page-locked if the device's copies need that and the limit allows it."""
        with writing():
            return torch.empty(size, dtype=torch.uint8)

    def forget_host(self, buffer: torch.Tensor) -> None:
        """Unlock bytes of the host again."""

    def unlocked(self, buffers: Iterable[torch.Tensor]) -> int:
        """Return the bytes of buffers that are not page-locked and should be."""
        del buffers
        return 0

    # --- order ---

    def order(self) -> None:
        """Let the computation of this stream wait for that of the last one: both use the same memory."""

    def mark(self, *, timed: bool = False) -> Any:
        """Return an event after the computation so far."""
        del timed
        moment = Moment()
        moment.reach()
        return moment

    def load(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Copy bytes once `after` has passed and the earlier copies are done; return the event of its arrival."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_copy_in_turn, args=(self._jobs,), daemon=True, name="tritium-copies"
            )
            self._thread.start()
        arrived = Moment()
        self._jobs.put((target, source, after, arrived))
        return arrived

    def wait(self, event: Any) -> None:
        """Let the computation wait for an event."""
        event.wait()

    def finish(self) -> None:
        """Let the computation wait for all copies so far, so that their memory can be freed."""
        last = Moment()
        self._jobs.put((None, None, None, last))
        if self._thread is not None:
            last.wait()

    def give_back(self) -> None:
        """Return freed memory to the device."""

    def rate(self) -> float | None:
        """Return the measured bytes a second; None on a CPU, whose copies are emulated."""
        return None


def _copy_in_turn(jobs: queue.SimpleQueue[Any]) -> None:
    while True:
        target, source, after, arrived = jobs.get()
        if target is not None:
            if after is not None:
                after.wait()
            with writing():
                # Weights that are read too early show.
                target.fill_(0xFF)
                target.copy_(source)
        arrived.reach()


class CudaLink(Link):
    """Copies to a GPU on a separate stream; nothing waits on the host."""

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._locked: set[int] = set()
        self._last: Any = None

    @functools.cached_property
    def _copies(self) -> Any:
        return torch.cuda.Stream(self.device)

    def allocate(self, size: int) -> torch.Tensor:
        with writing():
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        # The memory may still be read by work that is queued.
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        return buffer

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def most_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def host(self, size: int) -> torch.Tensor:
        left = device.host_memory()
        if not size or (left is not None and left - size < max(_LEFT, _LEFT_SHARE * left)):
            return super().host(size)
        pages = mmap.mmap(-1, size)
        with contextlib.suppress(AttributeError, OSError):
            # Locking takes time for each page.
            pages.madvise(mmap.MADV_HUGEPAGE)
        with writing():
            buffer = torch.frombuffer(pages, dtype=torch.uint8)
        # PyTorch's own page-locked memory is rounded up to a power of two.
        if compat.capture.lock_pages(buffer):
            self._locked.add(buffer.data_ptr())
        return buffer

    def forget_host(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() in self._locked:
            self._locked.discard(buffer.data_ptr())
            compat.capture.unlock_pages(buffer)

    def unlocked(self, buffers: Iterable[torch.Tensor]) -> int:
        return sum(buffer.numel() for buffer in buffers if buffer.numel() and buffer.data_ptr() not in self._locked)

    def order(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def mark(self, *, timed: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def load(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        if after is not None:
            self._copies.wait_event(after)
        with writing(), torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._copies)
        return event

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def give_back(self) -> None:
        device.empty_cache()

    @functools.cached_property
    def _rate(self) -> float:
        return measure.link_rate(self.device)

    def rate(self) -> float | None:
        return self._rate


@functools.cache
def link_to(where: torch.device) -> Link:
    """Return the link to a device, which everything in the process shares."""
    return CudaLink(where) if where.type == "cuda" else Link(where)
