"""The way into a part: counts its calls, times them, and passes them on."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from tritium import compat

# The newest calls are kept: a long-running server must not grow.
_KEPT = 1024


class Times:
    """The calls of a part in one way of running it."""

    def __init__(self) -> None:
        self.calls = 0
        # Seconds of the calls in which something was compiled.
        self.compiling: list[float] = []
        self._host: deque[float] = deque(maxlen=_KEPT)
        self._device: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        graphs = compat.graphs_compiled()
        on_device = _on_device(args, kwargs) and not torch.cuda.is_current_stream_capturing()
        if on_device:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        start = time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - start
        if compat.graphs_compiled() != graphs:
            self.compiling.append(seconds)
        elif on_device:
            events[1].record()
            self._device.append(events)
        else:
            self._host.append(seconds * 1e3)
        return result

    def milliseconds(self) -> float | None:
        """The median of the calls in which nothing was compiled; waits for a device. None if there were none."""
        taken = list(self._host)
        if self._device:
            torch.cuda.synchronize()
            taken += [float(start.elapsed_time(end)) for start, end in self._device]
        return statistics.median(taken) if taken else None


def _on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The arguments, not the weights: those may be on their way from the host.
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values()))


class Entry:
    """A module's call while its part is watched; stands in `_compiled_call_impl`, which `nn.Module.__call__` asks first.

    `inner` is what runs: the module's own `_call_impl`, or what torch.compile made of it. Each way of running the part is
    timed on its own, and `times` is that of the present one.
    """

    def __init__(self, module: nn.Module) -> None:
        # The compiled call that somebody else had put here: it runs on where the module is left alone.
        self.before: Callable[..., Any] | None = module._compiled_call_impl
        self.inner: Callable[..., Any] = self.before or module._call_impl
        self._by_way: dict[Hashable, Times] = {}
        self.times = Times()
        # The `Installed` that put this here.
        self.installed: Any = None
        # Called once with the arguments of the first call, before it runs.
        self.before_first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None

    def switch(self, way: Hashable) -> None:
        """Time the next calls as another way of running."""
        self.times = self._by_way.setdefault(way, Times())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compat.is_compiling():
            return self.inner(*args, **kwargs)
        if self.before_first is not None:
            decide, self.before_first = self.before_first, None
            decide(args, kwargs)
        return self.times.run(self.inner, args, kwargs)
