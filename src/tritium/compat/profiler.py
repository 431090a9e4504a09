"""Names that torch's profiler gives to compiled regions and kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

_REGION = "Torch-Compiled Region: "


def region_of(event: Any) -> str | None:
    """The graph that a profiler's event lies directly in; None outside of any, and for what an operator calls inside."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_REGION):
            return str(parent.name.removeprefix(_REGION))
        if "::" in parent.name:
            return None
        parent = parent.cpu_parent
    return None


def entered_region(event: Any) -> str | None:
    """The graph that starts to run with this event."""
    return str(event.name.removeprefix(_REGION)) if event.name.startswith(_REGION) else None


@contextlib.contextmanager
def visible_kernels(names: Collection[str]) -> Iterator[None]:
    """Let the profiler see generated C++ kernels by their names, as it sees Triton's.

    Inductor has a setting for this which makes it generate other code; here the functions that the code calls are
    wrapped for as long as somebody looks.
    """
    cache = importlib.import_module("torch._inductor.codecache").PyCodeCache
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in cache.modules:
        space = vars(module)
        for name in [name for name in names if name.startswith("cpp_") and callable(space.get(name))]:
            replaced.append((space, name, space[name]))
            space[name] = _named(name, space[name])
    try:
        yield
    finally:
        for space, name, original in reversed(replaced):
            space[name] = original


def _named(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    record = importlib.import_module("torch._C._profiler")._RecordFunctionFast

    def named(*args: Any, **kwargs: Any) -> Any:
        with record(name):
            return kernel(*args, **kwargs)

    return named


def is_work(event: str) -> bool:
    """Whether a profiler's event on a CPU is an operator, or a compiled graph as a whole: not bookkeeping of Dynamo's."""
    return "::" in event or "CompiledFxGraph" in event
