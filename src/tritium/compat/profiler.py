"""Names that torch's profiler gives to compiled regions and kernels."""

from __future__ import annotations

import contextlib
import functools
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
    modules = importlib.import_module("torch._inductor.codecache").PyCodeCache.modules
    record = importlib.import_module("torch._C._profiler")._RecordFunctionFast

    def named(name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with record(name):
            return kernel(*args, **kwargs)

    originals = [
        (vars(module), name, vars(module)[name])
        for module in modules
        for name in vars(module).keys() & set(names)
        if name.startswith("cpp_") and callable(vars(module)[name])
    ]
    for space, name, kernel in originals:
        space[name] = functools.partial(named, name, kernel)
    try:
        yield
    finally:
        for space, name, kernel in originals:
            space[name] = kernel


def is_work(event: str) -> bool:
    """Return True if a CPU event is an operator or a whole compiled graph, and not Dynamo's bookkeeping."""
    return "::" in event or "CompiledFxGraph" in event
