"""Diffusers' registry of attention backends, which has no public way to add a name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from tritium.errors import ArgumentError, MissingExtra

# The attribute of attention processors that names their backend.
BACKEND = "_attention_backend"


def add_backend(name: str, function: Callable[..., Any]) -> Any:
    """Register an attention backend and return its name as a member of diffusers' enumeration.

    The function gets the arguments of diffusers' dispatcher that it has parameters for.
    """
    names, registry = _dispatcher()
    member = names._value2member_map_.get(name)
    if member is None:
        # Diffusers looks names up in the enumeration, and enumerations cannot be extended.
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper().replace(":", "_"), name
        names._member_map_[member._name_] = names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    elif member in registry._backends and not hasattr(registry._backends[member], "tritium_backend"):
        raise ArgumentError(f"diffusers has an attention backend {name!r} of its own; choose another name")
    function.tritium_backend = name  # type: ignore[attr-defined]
    registry.register(member)(function)
    return member


def remove_backend(name: str) -> None:
    names, registry = _dispatcher()
    member = names._value2member_map_.pop(name)
    del names._member_map_[member._name_]
    names._member_names_.remove(member._name_)
    for known in (registry._backends, registry._constraints, registry._supported_arg_names):
        del known[member]


def kept_in_float32(model: Any) -> set[str]:
    """Return the names of modules that a class keeps in float32 when a checkpoint is loaded in another dtype."""
    return set(getattr(model, "_keep_in_fp32_modules", None) or ())


def precise_patterns(model: Any) -> list[str]:
    """Return patterns of the names of modules that a class keeps in high precision, when it stores or casts weights."""
    skipped = getattr(model, "_skip_layerwise_casting_patterns", None) or ()
    return [*skipped, *map(re.escape, sorted(kept_in_float32(model)))]


def _dispatcher() -> tuple[Any, Any]:
    try:
        module = importlib.import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        if importlib.util.find_spec("diffusers") is None:
            raise MissingExtra("diffusers", "diffusers", "set_attention") from error
        raise ArgumentError("this version of diffusers has no attention backends; 0.36 and later have them") from error
    return module.AttentionBackendName, module._AttentionBackendRegistry


def step_of(scheduler: Any) -> int:
    """Return the index of the step that a pipeline is in, from the scheduler's own count; 0 before the first step."""
    index = getattr(scheduler, "step_index", None)
    return 0 if index is None else int(index)


def steps_of(scheduler: Any) -> int:
    return len(scheduler.timesteps)


def moment_of(scheduler: Any) -> tuple[Any, int] | None:
    """Return the timesteps of the image that a scheduler is in, and the index of its step; None if it counts no steps.

    `set_timesteps` assigns a new object, so the object identifies the image. Nothing is read from the device.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not hasattr(scheduler, "step_index"):
        return None
    index = scheduler.step_index
    if index is None:
        # Pipelines that start in the middle of a schedule say where, or the scheduler finds it in its first step.
        index = getattr(scheduler, "begin_index", None)
    return timesteps, 0 if index is None else int(index)


def abscissae_of(scheduler: Any) -> Any:
    """Return a tensor with the noise level of every step, or with the timesteps if a scheduler has none."""
    sigmas = getattr(scheduler, "sigmas", None)
    return scheduler.timesteps if sigmas is None else sigmas


def is_two_stage(scheduler: Any) -> bool:
    """Return True if a scheduler calls the denoiser twice for every step, as Heun's method does."""
    order: Any = getattr(scheduler, "order", 1)
    return isinstance(order, int) and order > 1


def group_offloads(module: Any) -> bool:
    """Return True if diffusers moves groups of a module's layers to the device while it runs."""
    return any(
        "offload" in name
        for inner in module.modules()
        for name in getattr(getattr(inner, "_diffusers_hook", None), "hooks", ())
    )


def tensor_plan(model: nn.Module) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Return the linears that a model's tensor-parallel plan splits: path, whether by outputs, and parts of features."""
    found = []
    modules = dict(model.named_modules())
    for pattern, style in (getattr(model, "_tp_plan", None) or {}).items():
        by_outputs = "col" in (style if isinstance(style, str) else type(style).__name__).lower()
        matcher = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        attribute = "_tp_packed_col_blocks" if by_outputs else "_tp_packed_row_blocks"
        for path in filter(matcher.fullmatch, modules):
            parts = None if isinstance(style, str) else style.blocks or getattr(modules[path], attribute)
            found.append((path, by_outputs, tuple(parts or ())))
    return found


def unpacked_latents(pipe: Any, latents: Any, height: int, width: int) -> Any:
    """Return latents [B, tokens, C] of a pipeline as [B, C, H, W]; None if it packs them in another way than FLUX."""
    unpack = getattr(pipe, "_unpack_latents", None)
    if unpack is None or list(inspect.signature(unpack).parameters)[1:] != ["height", "width", "vae_scale_factor"]:
        return None
    return unpack(latents, height, width, pipe.vae_scale_factor)
