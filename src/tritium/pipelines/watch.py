"""Count and time the calls of a part."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from tritium import compat

# Keep only the newest calls: a long-running server must not grow.
_KEPT = 1024


class Times:
    """The calls of a part in one way of running it."""

    def __init__(self) -> None:
        self.calls = 0
        # Seconds of the calls that compiled.
        self.compiling: list[float] = []
        self._host: deque[float] = deque(maxlen=_KEPT)
        self._device: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        graphs = compat.dynamo.graphs_compiled()
        on_device = _on_device(args, kwargs) and not torch.cuda.is_current_stream_capturing()
        if on_device:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        start = time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - start
        if compat.dynamo.graphs_compiled() != graphs:
            self.compiling.append(seconds)
        elif on_device:
            events[1].record()
            self._device.append(events)
        else:
            self._host.append(seconds * 1e3)
        return result

    def milliseconds(self) -> float | None:
        """Return the median time of calls that compiled nothing, or None; synchronizes the device."""
        taken = list(self._host)
        if self._device:
            torch.cuda.synchronize()
            taken += [float(start.elapsed_time(end)) for start, end in self._device]
        return statistics.median(taken) if taken else None


def _on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Check the arguments, not the weights: offloaded weights may still be on the host.
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values()))


class Entry:
    """The timed call of a part's module, in `_compiled_call_impl`: `nn.Module.__call__` reads it first.

    `inner` is called: the module's `_call_impl`, or a compiled version of it. Each way of running the part is timed
    separately, and `times` belongs to the current one.
    """

    def __init__(self, module: nn.Module) -> None:
        # The compiled call that was here before: it runs while the part is eager.
        self.before: Callable[..., Any] | None = module._compiled_call_impl
        self.inner: Callable[..., Any] = self.before or module._call_impl
        self._by_way: dict[Hashable, Times] = {}
        self.times = Times()
        # The `Installed` that put this here.
        self.installed: Any = None
        # Called once with the arguments of the first call, before it runs.
        self.before_first: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None

    def switch(self, way: Hashable) -> None:
        """Count the next calls for another way of running."""
        self.times = self._by_way.setdefault(way, Times())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compat.dynamo.is_compiling():
            return self.inner(*args, **kwargs)
        if self.before_first is not None:
            decide, self.before_first = self.before_first, None
            decide(args, kwargs)
        return self.times.run(self.inner, args, kwargs)
