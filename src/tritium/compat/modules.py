"""Private attributes of modules, of torch.compile's wrappers, and of diffusers' and accelerate's classes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


# The attribute of a module with the function that a call of the module runs; if it is None, a call is not compiled.
COMPILED_CALL = "_compiled_call_impl"

# The attribute of a pipeline with the arguments of its progress bar.
PROGRESS_BAR = "_progress_bar_config"


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """Return the uncompiled call of a module: its forward between its hooks."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a call of the module runs instead of `eager_call`, or None."""
    return module._compiled_call_impl


def is_wrapped(module: nn.Module) -> bool:
    """Return True for the wrapper that `torch.compile(module)` creates."""
    return isinstance(module, importlib.import_module("torch._dynamo").OptimizedModule)


def unwrapped(module: Any) -> Any:
    """Return the module inside the wrapper of `torch.compile(module)`; any other object is returned unchanged."""
    return getattr(module, "_orig_mod", module)


# The attribute of torch.compile's wrappers with the function that they wrap.
WRAPPED_FUNCTION = "_torchdynamo_orig_callable"


def wraps_compiled(function: Any) -> bool:
    """Return True for a function that torch.compile returned."""
    return hasattr(function, WRAPPED_FUNCTION)


def codes(function: Any) -> Iterator[CodeType]:
    """Yield the code objects of a function or method, also behind wrappers."""
    seen: set[int] = set()
    stack = [function]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        inner = (getattr(current, name, None) for name in ("__wrapped__", WRAPPED_FUNCTION, "__func__", "func"))
        stack += [entry for entry in inner if callable(entry)]
        code = getattr(current, "__code__", None)
        # Skip the wrapper's code, which is the same for every function that torch.compile wraps.
        if isinstance(code, CodeType) and not wraps_compiled(current):
            yield code


def class_call_is_compiled(module: nn.Module) -> bool:
    """Return True if the forward or the call of a module's class was compiled."""
    return any(wraps_compiled(getattr(type(module), name)) for name in ("forward", "_call_impl"))


def map_tensors(module: M, function: Callable[[torch.Tensor], torch.Tensor]) -> M:
    """Replace every parameter and buffer of a module, as `module.to` does, and return the module."""
    module._apply(function)  # type: ignore[no-untyped-call]
    return module


def tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries of a module's own parameters and of its own buffers, by name."""
    return module._parameters, module._buffers


def hooks_registered() -> int:
    """Return the number of module hooks registered in this process so far; each registration increases it."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the classes that a diffusers model names for `compile_repeated_blocks`."""
    return tuple(getattr(module, "_repeated_blocks", None) or ())


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return True for a module of exactly this class, whose call runs the forward of its class and no hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in module.__dict__


def accelerate_hook(module: nn.Module) -> Any:
    """Return accelerate's hook on a module, or None."""
    return getattr(module, "_hf_hook", None)


def diffusers_hooks(module: nn.Module) -> list[str]:
    registry: Any = getattr(module, "_diffusers_hook", None)
    return sorted(registry.hooks) if registry is not None else []
