"""What each variant of a workload runs: the same weights, compiled in another way.

Dynamo keys compiled code on code object and backend, so wrapping a module twice gives two independent compiled versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat, ops
from tritium.api import Handle, optimize
from tritium.bench.results import (
    EAGER,
    EXACT,
    GRAPHS,
    INDUCTOR,
    OPTIMIZED,
    REDUCE_OVERHEAD,
    REUSE_BLOCKS,
    STATIC,
    TRITIUM,
    TRITIUM_STATIC,
    without,
)
from tritium.bench.settings import Settings
from tritium.bench.workload import Built
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.pipelines.plan import Plan


class _VariantBackend(Backend):
    """A backend that equals only those of its variant, so that Dynamo shares no code between variants."""

    def __init__(self, config: CompilationConfig, variant: str) -> None:
        self._variant = variant
        super().__init__(config)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._variant)


def _static_inductor(gm: Any, example_inputs: Any) -> Any:
    """Call Inductor under another name, so that Dynamo keeps static and dynamic code apart."""
    return compat.inductor.compile_fx(gm, example_inputs)


def compile_variant(model: Any, variant: str, settings: Settings, *, dynamic: bool | None = None) -> Any:
    """Compile a module or function for a variant; all compiled variants get the same mode and the same dynamic sizes."""
    config = settings.config or CompilationConfig()
    if variant in (STATIC, TRITIUM_STATIC):
        dynamic = False
    if variant == EAGER:
        return model
    if variant == INDUCTOR:
        return torch.compile(model, mode=settings.mode, dynamic=dynamic)
    if variant == REDUCE_OVERHEAD:
        return torch.compile(model, mode="reduce-overhead", dynamic=dynamic)
    if variant == STATIC:
        return torch.compile(model, backend=_static_inductor, dynamic=dynamic)
    changes: dict[str, dict[str, Any]] = {
        EXACT: {"engine": "eager", "fidelity": "exact"},
        GRAPHS: {"graphs": "with_compile"},
        REUSE_BLOCKS: {"reuse_blocks": True},
        **{without(op): {"force_provider": {op: ops.INDUCTOR}} for op in settings.without},
    }
    backend = _VariantBackend(config.with_(**changes.get(variant, {})), variant)
    # Engine `eager` generates no code, so it has no mode.
    return torch.compile(model, backend=backend, mode=mode_of(variant, settings), dynamic=dynamic)


def mode_of(variant: str, settings: Settings) -> str | None:
    """Return the mode that torch.compile gets for a variant; None where it is not called, or for code without a mode."""
    if variant == REDUCE_OVERHEAD:
        return "reduce-overhead"
    is_compiled = variant.startswith((INDUCTOR, TRITIUM)) and variant not in (EXACT, OPTIMIZED)
    return settings.mode if is_compiled else None


@dataclass(frozen=True)
class Compiled:
    """The call of a workload in one variant, and its compiled modules."""

    call: Callable[..., Any]
    parts: list[Any]


def compiled(built: Built, variant: str, settings: Settings, *, dynamic: bool = False) -> Compiled:
    """Compile the parts of a workload for a variant."""
    parts: list[Any] = []

    def compile_(module: Any) -> Any:
        all_dims = True if dynamic and built.dims is None else None
        parts.append(compile_variant(module, variant, settings, dynamic=all_dims))
        return parts[-1]

    return Compiled(built.install(built.model, compile_), parts)


def start_compiler(settings: Settings) -> None:
    """Compile a small function, so that the first variant does not include the start of the compiler."""
    if settings.cold:
        # Importing Inductor and building its pattern tables takes seconds, once a process.
        with compat.inductor.empty_cache():
            torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=settings.device_type))


def optimized(target: Any, settings: Settings) -> Handle:
    """Optimize a pipeline or a bare module with the defaults, in place."""
    return optimize(target, Plan(progress=False, config=settings.config or CompilationConfig()))


def twin(model: Any) -> Any:
    """Copy a module tree; parameters and buffers stay the tensors of the original.

    What a variant does in place (compiled blocks, a handle) is then invisible to the others, so that they can be
    interleaved.
    """
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def twin_pipeline(pipe: Any, *names: str) -> Any:
    """Copy a pipeline with twins of the named components; the others are shared."""
    return type(pipe)(**{**pipe.components, **{name: twin(getattr(pipe, name)) for name in names}})
