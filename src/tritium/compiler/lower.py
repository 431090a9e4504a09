"""Hand the rewritten graph to the engine that runs it, with the settings that were asked for.

A lowering that fails is tried once more on the graph as Dynamo made it, without requests; if that fails too the graph
runs uncompiled. Each step down is in the report with the error and the graphs that caused it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tritium import compat
from tritium.compiler import libraries
from tritium.compiler.observe import KernelObserver, store, store_key
from tritium.report import GraphRecord

# The setting that carries our identity into Inductor's cache key.
SALT = "post_grad_custom_pre_pass"


@dataclass
class Lowering:
    """One attempt: a graph, its inputs, Inductor's settings, and the identity that goes into the cache key."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    settings: Mapping[str, Any]
    identity: bytes
    # The kernels that code generation had written when the attempt failed.
    unfinished: list[dict[str, Any]] = field(default_factory=list)


def lower(attempt: Lowering, record: GraphRecord) -> Callable[..., Any]:
    """Compile with Inductor, and write into the record what its code generation did, now or in an earlier process."""
    settings = dict(attempt.settings)
    own = settings.get(SALT, compat.inductor_settings().get(SALT))
    settings[SALT] = compat.salted_pass(attempt.identity, own)
    libraries.install()
    observer = KernelObserver(record.device_type)
    with compat.inductor_patched(settings):
        key = store_key(attempt.gm.graph, attempt.identity)
        try:
            with compat.observed_codegen(observer), compat.recorded_kernels(observer):
                compiled = compat.compile_fx(attempt.gm, attempt.example_inputs)
        except Exception:
            attempt.unfinished = observer.dissection.unfinished()
            raise
    if observer.saw_codegen:
        observation = observer.observation()
        record.observed(observation, "codegen")
        store().save(key, observation)
    elif (found := store().load(key)) is not None:
        record.observed(found, "store")
    _write_for_debugging(record)
    return compiled


def _write_for_debugging(record: GraphRecord) -> None:
    """The kernels beside what torch writes for TORCH_COMPILE_DEBUG=1."""
    folder = compat.debug_folder()
    if folder is None:
        return
    try:
        record.write_kernels(folder / "tritium")
    except OSError as error:
        warnings.warn(f"tritium: kernels cannot be written into {folder}: {error}", RuntimeWarning, stacklevel=2)
