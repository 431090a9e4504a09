"""Variants of one module or pipeline side by side: each has its own module tree, and all share the weights.

What one side does in place (compiled blocks, a handle) is then invisible to the others, so that they can take turns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat
from tritium.api import Handle, optimize
from tritium.bench.results import OURS
from tritium.bench.run import Settings
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.pipelines.plan import Plan

# `tritium.optimize` with its defaults.
OPTIMIZED = f"{OURS} optimize"


def twin(model: Any) -> Any:
    """Copy a module tree; parameters and buffers stay the tensors of the original."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def twin_pipeline(pipe: Any, *names: str) -> Any:
    """Copy a pipeline with twins of the named components; the others are shared."""
    return type(pipe)(**{**pipe.components, **{name: twin(getattr(pipe, name)) for name in names}})


def optimized(target: Any, config: CompilationConfig | None = None) -> Handle:
    """Optimize a pipeline or a bare module with the defaults, in place."""
    return optimize(target, Plan(progress=False, config=config or CompilationConfig()))


class _Alone(Backend):
    """A backend that equals none that `optimize` made, so that Dynamo shares no compiled code between the two."""

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), "alone")


def backend_alone(config: CompilationConfig) -> Backend:
    """Make the backend of a side that `optimize` has no part in."""
    return _Alone(config)


def without_gradients(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run a call in inference mode."""

    @functools.wraps(call)
    def run() -> Any:
        with torch.inference_mode():
            return call()

    return run


def cold_caches(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Compile with empty caches if the settings say so."""
    return compat.inductor.empty_cache() if settings.cold else contextlib.nullcontext()


def allocated(device_type: str) -> int:
    """Count the bytes that torch holds on a GPU; 0 on a CPU, where nothing is counted by side."""
    return torch.cuda.memory_allocated() if device_type == "cuda" else 0
