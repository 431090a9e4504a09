"""Postpone Inductor's wait for the kernels of a graph, so that the code of other graphs is generated meanwhile.

Worker processes compile kernels, and a generated module waits for them while it is imported. After that wait, Inductor
collects the compiled kernels for the entry in its graph cache and writes the entry. Inside `postponed`, the wait and the
entry are left to `LateKernels.finish`. AOTAutograd's entry is written at its usual time: it only refers to Inductor's
entry, and without that entry it is a cache miss.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from tritium.compat.inductor import setting, setting_names
from tritium.compat.wrapping import wrap_once

_LATE: ContextVar[LateKernels | None] = ContextVar("tritium_late_kernels", default=None)

# The functions that are postponed or called later: module, class, name.
_HOOKS = (
    ("async_compile", "AsyncCompile", "wait"),
    ("codecache", "FxGraphCache", "_save_graph"),
    ("output_code", "CompiledFxGraph", "set_triton_bundle"),
    ("output_code", "CompiledFxGraph", "prepare_for_serialization"),
    ("triton_bundler", "TritonBundler", "begin_compile"),
    ("triton_bundler", "TritonBundler", "collect"),
    ("triton_bundler", "TritonBundler", "end_compile"),
)

# Settings with which Inductor runs kernels while it generates code, or generates another kind of code.
_RUN_KERNELS = (
    *("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "benchmark_fusion", "benchmark_combo_kernel"),
    *("benchmark_kernel", "profile_bandwidth", "triton.multi_kernel", "triton.autotune_at_compile_time", "cpp_wrapper"),
)


class LateKernels:
    """The postponed waits and cache entries of one graph, in order."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def finish(self) -> None:
        """Wait for the kernels, then write the cache entries; raise the error of a kernel that cannot be compiled.

        Call it with the settings and in the thread of the compilation.
        """
        steps, self._steps = self._steps, []
        bundler = _bundler()
        bundler.begin_compile()
        try:
            for step in steps:
                step()
        finally:
            bundler.end_compile()

    def _wait(self, original: Callable[..., Any], compiler: Any, scope: dict[str, Any]) -> None:
        pending = importlib.import_module("torch._inductor.async_compile")
        futures = (pending.Future, pending.CodeCacheFuture)
        if any(isinstance(value, futures) for value in scope.values()):
            self._steps.append(lambda: original(compiler, scope))
        else:
            original(compiler, scope)

    def _save(self, original: Callable[..., Any], key: str, compiled: Any, *rest: Any, **named: Any) -> None:
        if not self._steps:
            original(key, compiled, *rest, **named)
            return
        # The compilation changes the object after this point. A copy with code would clear that code when it is freed.
        kept = copy.copy(compiled)
        kept.prepare_for_serialization()

        def save() -> None:
            bundler = _bundler()
            late, _ = bundler.collect()
            kept.set_triton_bundle(_joined(kept._triton_bundle, late))
            original(key, kept, *rest, **named)
            bundler.begin_compile()

        self._steps.append(save)


def _bundler() -> Any:
    return importlib.import_module("torch._inductor.triton_bundler").TritonBundler


def _joined(early: Any, late: Any) -> Any:
    """Return a bundle with the kernels that this process compiled at once, and those of the workers."""
    if early is None:
        return late
    both = (early.kernel_artifacts + late.kernel_artifacts, early.static_autotuners + late.static_autotuners)
    return type(late)(*both)


@contextlib.contextmanager
def postponed() -> Iterator[LateKernels]:
    """Yield what `finish` does later for the graph that is compiled inside."""
    _install()
    late = LateKernels()
    token = _LATE.set(late)
    try:
        yield late
    finally:
        _LATE.reset(token)


def _install() -> None:
    def postpone(method: Callable[..., None]) -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            late = _LATE.get()
            return original(*args, **kwargs) if late is None else method(late, original, *args, **kwargs)

        return call

    wrap_once(_class("async_compile", "AsyncCompile"), "wait", postpone(LateKernels._wait))
    wrap_once(_class("codecache", "FxGraphCache"), "_save_graph", postpone(LateKernels._save))


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"torch._inductor.{module}"), name, None)


def decline_late_kernels() -> str | None:
    """Return why the kernels of a graph are waited for before the next graph, or None; depends on Inductor's settings."""
    if (missing := decline_hooks()) is not None:
        return missing
    if setting("compile_threads") == 1:
        return "kernels are compiled in this process (compile_threads=1)"
    if used := [name for name in setting_names() if name in _RUN_KERNELS and setting(name)]:
        return f"Inductor runs kernels while it compiles, or calls them from C++ ({', '.join(used)})"
    # Then AOTAutograd's entry contains the kernels.
    functorch, dynamo = (importlib.import_module(f"torch.{name}.config") for name in ("_functorch", "_dynamo"))
    if functorch.bundled_autograd_cache or getattr(dynamo, "caching_precompile", False):
        return "AOTAutograd's cache keeps the kernels (bundled_autograd_cache)"
    return None


def decline_hooks() -> str | None:
    """Return which function this torch lacks to postpone the wait for kernels, or None."""
    for module, owner, name in _HOOKS:
        if not hasattr(_class(module, owner), name):
            return f"torch {torch.__version__} has no torch._inductor.{module}.{owner}.{name}"
    parameters = list(inspect.signature(_class("codecache", "FxGraphCache")._save_graph).parameters)
    if parameters[:2] != ["key", "compiled_graph"]:
        return f"torch {torch.__version__} has another signature of FxGraphCache._save_graph"
    return None
