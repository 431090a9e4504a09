"""Pass memory between processes without pickle, and build modules whose parameters have no memory yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tritium.compat.modules import COMPILED_CALL
from tritium.compat.wrapping import wrap_once

# A storage as CUDA IPC passes it: device, handle of the allocation, bytes, offset, file and offset of the count of users,
# handle of an event, and whether the event has to be waited for.
Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]


def share_cuda(storage: torch.UntypedStorage) -> Handle:
    """Return what another process needs to map a storage on a GPU: once for each process, for the count of users."""
    shared: Any = storage
    found: Handle = shared._share_cuda_()
    return found


def map_cuda(handle: Handle) -> torch.UntypedStorage:
    """Map a storage of another process on a GPU. It must not be resized."""
    torch.cuda.init()
    mapped: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*handle)
    return mapped


def has_expandable_segments() -> bool:
    """Return True if torch has allocated memory on a GPU in expandable segments, which have no handle of CUDA IPC."""
    return any(segment.get("is_expandable", False) for segment in torch.cuda.memory_snapshot())


def reject_calls(module: nn.Module, error: Callable[..., Any]) -> None:
    """Let every call of a module run `error` instead: eager calls, compiled ones, and those of compiled callers.

    Dynamo guards on the `forward` of the modules whose code it has inlined.
    """
    setattr(module, COMPILED_CALL, error)
    module.forward = error


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are created inside have parameters without memory; their buffers are computed as usual."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        made = self._parameters.get(name)
        if made is not None and not made.is_meta:
            self._parameters[name] = nn.Parameter(made.to("meta"), requires_grad=made.requires_grad)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def before_loading(function: Callable[[nn.Module], Any]) -> None:
    """Run a function on a module before its `load_state_dict` writes into it, from now on."""

    def loaded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function(args[0])
        return original(*args, **kwargs)

    wrap_once(nn.Module, "load_state_dict", loaded)


def collect_cuda() -> None:
    """Free memory of a GPU that other processes have given back."""
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
