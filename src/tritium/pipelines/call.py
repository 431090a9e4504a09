"""The call of a part's module: what happens around it, in order, and the program inside.

`nn.Module.__call__` reads the module's slot for a compiled call first, and a `Call` is put there. Its functions run
around every call, outermost first: techniques that answer a call themselves, timing, the pause of the garbage collector
while compiling, the check of memory, progress, the shape contract, other techniques.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.techniques.technique import Around

Function = Callable[..., Any]

# Keep only the newest calls: a long-running server must not grow.
_KEPT = 1024


class Call:
    """The function in the slot of a part's module.

    A caller that compiles a larger graph gets `traced`; every other call runs `counted`. `uncounted` is the part without
    its timing, for trials.
    """

    def __init__(self, module: nn.Module, part: Any) -> None:
        # The compiled call that was in the slot before: it runs while the part is eager.
        self.before: Function | None = compat.modules.compiled_call(module)
        self.plain: Function = self.before or compat.modules.eager_call(module)
        self.part = part
        self.traced = self.uncounted = self.counted = self.plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if compat.dynamo.is_compiling():
            return self.traced(*args, **kwargs)
        return self.counted(*args, **kwargs)


def chain(functions: Sequence[Around], inner: Function) -> Function:
    """Return a function that runs others around one, the first outermost."""
    for function in reversed(functions):
        inner = functools.partial(_apply, function, inner)
    return inner


def _apply(function: Around, inner: Function, /, *args: Any, **kwargs: Any) -> Any:
    return function(inner, args, kwargs)


class Times:
    """The number and times of the calls of a part in one way of running it."""

    def __init__(self) -> None:
        self.calls = 0
        # Seconds of the calls that compiled.
        self.compiling: list[float] = []
        self._host: deque[float] = deque(maxlen=_KEPT)
        self._device: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)

    def around(self, call: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while compiling. Reference counts still free objects.

    Importing and running a compiler creates hundreds of thousands of lasting objects. Every collection of them also
    visits all earlier objects of the process, and frees almost nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Move new objects to the oldest generation: most stay, and the next collection would visit all. unfreeze moves
            # all frozen objects there, so do nothing if other code has frozen some. Counting these visits all of them: only
            # if a collection is due.
            if gc.get_count()[0] > gc.get_threshold()[0] and gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
