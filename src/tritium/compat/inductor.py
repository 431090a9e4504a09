"""Inductor's configuration, its caches, and compilation of one graph."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx


def inductor_config() -> Any:
    return importlib.import_module("torch._inductor.config")


def inductor_settings() -> dict[str, Any]:
    return cast("dict[str, Any]", inductor_config().get_config_copy())


def inductor_patched(changes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Change settings for code that runs inside, in this thread, and restore them on any exit.

    torch 2.13 keeps overrides in context variables, 2.11 in globals; `config.patch` entered and left in the compiling
    thread is correct for both, because Dynamo compiles one frame at a time.
    """
    return cast("AbstractContextManager[None]", inductor_config().patch(dict(changes)))


def setting_names() -> list[str]:
    """Return the names of all settings; copying their values would take a millisecond."""
    return list(inductor_config()._config)


def setting(name: str) -> Any:
    return getattr(inductor_config(), name)


def assign(name: str, value: Any) -> None:
    setattr(inductor_config(), name, value)


def unknown_settings(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in inductor_config()._config]


def mode_settings(mode: str | None) -> dict[str, Any]:
    """Return Inductor's settings for `torch.compile(mode=...)`."""
    if mode in (None, "default"):
        return {}
    inductor = importlib.import_module("torch._inductor")
    return dict(inductor.list_mode_options(mode))


def allows_tf32() -> bool:
    """Return True if float32 convolutions may run on tensor cores."""
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32")


# Threads that prepare the first compilation, which waits for them: by name.
_preparing: dict[str, threading.Thread] = {}


def overlap_settings() -> dict[str, Any]:
    """Return the settings by which collectives start early and are waited for late; empty where that is the default.

    torch 2.15 moves collectives by itself.
    """
    if not unknown_settings(["aten_distributed_optimizations.enable_simple_overlap"]):
        return {}
    switch, passes = "reorder_for_compute_comm_overlap", ["raise_comms", "sink_waits_iterative"]
    comms = importlib.import_module("torch._inductor.comms")
    if unknown_settings([switch, f"{switch}_passes"]) or not all(hasattr(comms, name) for name in passes):
        return {}
    return {switch: True, f"{switch}_passes": passes}


def start_hashing() -> None:
    """Start hashing the files of torch and Triton, which are part of every cache key, in a thread.

    These are half a gigabyte, most of it in one library; reading and hashing release Python's lock. `compile_fx` waits
    for the thread.
    """
    _prepare("tritium-hashing", _hash_code)


def start_workers() -> None:
    """Start the processes that compile GPU kernels, in a thread, as the backend `inductor` does in its first call.

    They take seconds to start. Until they run, Inductor compiles one kernel after another in this process.
    """
    if setting("compile_threads") == 1:
        return

    def start() -> None:
        # Their command line contains the hash.
        _hash_code()
        warm = getattr(importlib.import_module("torch._inductor.async_compile"), "maybe_warm_pool", None)
        if warm is not None:
            warm()

    _prepare("tritium-workers", start)


def _hash_code() -> None:
    importlib.import_module("torch._inductor.codecache").torch_key()
    triton = importlib.import_module("torch._inductor.runtime.triton_compat")
    if triton.HAS_TRITON:
        triton.triton_key()


def _prepare(name: str, function: Callable[[], None]) -> None:
    """Run a function once per process in a thread."""
    if name in _preparing:
        return
    # Import here and not in the thread: with circular imports, two threads could see a half-initialised module.
    for module in ("codecache", "runtime.triton_compat", "async_compile"):
        importlib.import_module(f"torch._inductor.{module}")

    def run() -> None:
        # The compilation calls the same functions, and reports their errors.
        with contextlib.suppress(Exception):
            function()

    _preparing[name] = threading.Thread(target=run, name=name, daemon=True)
    _preparing[name].start()


def import_compiler() -> None:
    """Import the modules for torch's first compilation: a thousand of them, in one to three seconds."""
    for name in ("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


def compile_fx(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    module = importlib.import_module("torch._inductor.compile_fx")
    for thread in _preparing.values():
        thread.join()
    return cast("Callable[..., Any]", module.compile_fx(gm, example_inputs))


def boxed(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return a result of `compile_fx` as a function of a list that it empties, to free inputs early.

    Inductor's code has this form inside two wrappers; if this torch has other wrappers, they are called unchanged.
    """
    # torch._dynamo.disable: the call of the whole graph is already disabled.
    inner = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    cells = inspect.getclosurevars(inner).nonlocals if inspect.isfunction(inner) else {}
    if cells.keys() == {"compiled_fn", "params_buffers_flat"} and not cells["params_buffers_flat"]:
        return cast("Callable[[list[Any]], Any]", cells["compiled_fn"])

    def call(values: list[Any]) -> Any:
        return compiled(*values)

    return call


def global_state() -> tuple[Any, ...]:
    """Return the switches of PyTorch that affect the code of a graph."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        *(bool(getattr(cuda, f"{name}_sdp_enabled")()) for name in ("flash", "mem_efficient", "math", "cudnn")),
        allows_tf32(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.enabled,
    )


def cache_dir() -> Path:
    """Return Inductor's cache folder; Tritium's files are stored next to it and move with it."""
    return Path(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


def empty_cache() -> AbstractContextManager[Any]:
    """Compile with an empty cache folder that is removed afterwards."""
    return cast("AbstractContextManager[Any]", importlib.import_module("torch._inductor.utils").fresh_cache())


def vector_isas() -> list[str]:
    """Return the vector instruction sets that Inductor supports; checking the compiler would start it."""
    return list(importlib.import_module("torch._inductor.cpu_vec_isa").x86_isa_checker())


def salted_pass(identity: bytes, inner: Any) -> Any:
    """Return a post-grad pass that only changes Inductor's cache key, around the user's pass if any.

    Inductor's key contains only the name of a custom op: without this pass, code compiled for an older kernel or fake
    of the op would be reused.
    """
    base = importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    steps = [step for step in (inner if isinstance(inner, (list, tuple)) else [inner]) if step is not None]

    class Salt(base):  # type: ignore[misc, valid-type]
        def __call__(self, graph: fx.Graph) -> None:
            for step in steps:
                step(graph)

        def uuid(self) -> Any:
            # A plain function has no identity, so Inductor does not cache: keep this behaviour for the user's pass.
            theirs = [step.uuid() if isinstance(step, base) else None for step in steps]
            return None if None in theirs else (identity, *theirs)

    return Salt()


def debug_folder() -> Path | None:
    """Return the folder that torch writes to with `TORCH_COMPILE_DEBUG=1`, or None if it is off."""
    if not inductor_config().trace.enabled:
        return None
    return Path(importlib.import_module("torch._dynamo.utils").get_debug_dir())
