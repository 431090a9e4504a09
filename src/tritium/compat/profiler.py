"""Names that torch's profiler gives to compiled regions and kernels."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

_REGION = "Torch-Compiled Region: "


def region_of(event: Any) -> str | None:
    """Return the graph that directly contains a profiler's event; None outside, and inside of operators."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_REGION):
            return str(parent.name.removeprefix(_REGION))
        if "::" in parent.name:
            return None
        parent = parent.cpu_parent
    return None


def entered_region(event: Any) -> str | None:
    """Return the graph that starts to run with this event, or None."""
    return str(event.name.removeprefix(_REGION)) if event.name.startswith(_REGION) else None


@contextlib.contextmanager
def visible_kernels(names: Collection[str]) -> Iterator[None]:
    """Show generated C++ kernels by name in the profiler, as Triton kernels are.

    Inductor has a setting for this, but it changes the generated code. Here the called functions are wrapped only while
    the context is active.
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
    """Return True if a CPU event is an operator or a whole compiled graph, and not Dynamo's bookkeeping."""
    return "::" in event or "CompiledFxGraph" in event
