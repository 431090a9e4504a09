"""`tritium.compile`: torch.compile with this backend, and with dynamic dims named by argument.

    model = tritium.compile(model, dynamic_dims={"hidden_states": [1], "encoder_hidden_states": [-2]})

    @tritium.compile(dynamic_dims={"cfg.inner.t": [0]})
    def step(x, cfg): ...

Named dims may change without a recompile. All other sizes are static, and changing one recompiles.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from tritium.compiler.backend import Backend
from tritium.compiler.dynamic_dims import DynamicDims, marking
from tritium.config import CompilationConfig
from tritium.errors import ConfigError

T = TypeVar("T")


@overload
def compile(  # noqa: A001 - the name is the product's
    model: T,
    config: CompilationConfig | None = None,
    dynamic_dims: DynamicDims | None = None,
    **torch_compile_kwargs: Any,
) -> T: ...
@overload
def compile(  # noqa: A001
    model: None = None,
    config: CompilationConfig | None = None,
    dynamic_dims: DynamicDims | None = None,
    **torch_compile_kwargs: Any,
) -> Callable[[T], T]: ...
def compile(  # noqa: A001
    model: Any = None,
    config: CompilationConfig | None = None,
    dynamic_dims: DynamicDims | None = None,
    **torch_compile_kwargs: Any,
) -> Any:
    """Compile a module, a module class, a method or a function; without one, return a decorator.

    `config` configures the backend. `dynamic_dims` maps argument names to dims that may change: negative dims count
    from the end, dots select members of objects, dicts and sequences, and a star selects every tensor of a sequence or
    dict (`"feat_cache.*"`). Other arguments are passed to `torch.compile`.
    """
    if model is None:
        return functools.partial(compile, config=config, dynamic_dims=dynamic_dims, **torch_compile_kwargs)
    if "backend" in torch_compile_kwargs:
        raise ConfigError("tritium.compile sets the backend itself; use torch.compile to choose another")
    if dynamic_dims is not None:
        if torch_compile_kwargs.get("dynamic"):
            raise ConfigError("dynamic=True makes every dim dynamic: give dynamic_dims or dynamic, not both")
        torch_compile_kwargs["dynamic"] = False
    to_compiled = functools.partial(torch.compile, backend=Backend(config), **torch_compile_kwargs)
    if inspect.isclass(model):
        return _compile_class(model, to_compiled, dynamic_dims)
    if isinstance(model, torch.nn.Module):
        return _compile_module(model, to_compiled, dynamic_dims)
    if not callable(model):
        raise ConfigError(
            f"tritium.compile takes a module, a class, a method or a function, got {type(model).__name__}"
        )
    return marking(to_compiled(model), inspect.signature(model), dynamic_dims)


def _compile_class(cls: type, to_compiled: Callable[[Any], Any], dynamic_dims: DynamicDims | None) -> type:
    """Compile the forward or call method of a class in place."""
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    if name not in dir(cls):
        raise ConfigError(f"{cls.__name__} has no {name} to compile")
    original = getattr(cls, name)
    setattr(cls, name, marking(to_compiled(original), inspect.signature(original), dynamic_dims, wraps=original))
    return cls


def _compile_module(
    model: torch.nn.Module, to_compiled: Callable[[Any], Any], dynamic_dims: DynamicDims | None
) -> torch.nn.Module:
    optimized: torch.nn.Module = to_compiled(model)
    if dynamic_dims is not None:
        # torch.compile's wrapper calls this attribute.
        optimized.forward = marking(optimized.forward, inspect.signature(model.forward), dynamic_dims)
    return optimized


def compile_pinned(function: Callable[..., Any], providers: Mapping[str, str]) -> Callable[..., Any]:
    """Compile a function as one static graph, with a provider pinned by op."""
    backend = Backend(CompilationConfig(force_provider=dict(providers)))
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return compiled
