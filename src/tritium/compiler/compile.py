"""`tritium.compile`: torch.compile with this backend, and dynamic dims named by argument.

    model = tritium.compile(model, dynamic_dims={"hidden_states": [1], "encoder_hidden_states": [-2]})

    @tritium.compile(dynamic_dims={"cfg.inner.t": [0]})
    def step(x, cfg): ...

A dim that is named may change without a recompile; every other size is static, and a change of one compiles again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from tritium import compat
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, ShapeError, nearest

DynamicDims = Mapping[str, Sequence[int]]
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
    """Compile a module, a module class, a method or a function; without one, a decorator that does.

    `config` configures the backend. `dynamic_dims` maps argument names to dims that may change: negative dims count from
    the end, dots reach into objects, dicts and sequences. Everything else goes to `torch.compile` as it is.
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
    return _marking(to_compiled(model), inspect.signature(model), dynamic_dims)


def _compile_class(cls: type, to_compiled: Callable[[Any], Any], dynamic_dims: DynamicDims | None) -> type:
    """Compile what instances of a class run when they are called; the class itself is changed, as torch.compile does."""
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    if name not in dir(cls):
        raise ConfigError(f"{cls.__name__} has no {name} to compile")
    original = getattr(cls, name)
    setattr(cls, name, _marking(to_compiled(original), inspect.signature(original), dynamic_dims, wraps=original))
    return cls


def _compile_module(
    model: torch.nn.Module, to_compiled: Callable[[Any], Any], dynamic_dims: DynamicDims | None
) -> torch.nn.Module:
    optimized: torch.nn.Module = to_compiled(model)
    if dynamic_dims is not None:
        # The wrapper torch.compile makes calls this attribute; it has no dims of its own to mark.
        optimized.forward = _marking(optimized.forward, inspect.signature(model.forward), dynamic_dims)
    return optimized


def _marking(
    compiled: Callable[..., Any],
    signature: inspect.Signature,
    dynamic_dims: DynamicDims | None,
    wraps: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A compiled callable that marks the named dims of its arguments for each call."""
    if dynamic_dims is None:
        return compiled
    _check_names(signature, dynamic_dims)

    @functools.wraps(wraps or compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Inside somebody else's graph there are no tensors to mark.
            return compiled(*args, **kwargs)
        arguments = _arguments(signature, args, kwargs)
        with compat.marked_dynamic(list(_marks(arguments, dynamic_dims))):
            return compiled(*args, **kwargs)

    call.__wrapped__ = compiled
    return call


def _check_names(signature: inspect.Signature, dynamic_dims: DynamicDims) -> None:
    names = list(signature.parameters)
    open_ended = any(part.kind is part.VAR_KEYWORD for part in signature.parameters.values())
    for path, dims in dynamic_dims.items():
        name = path.split(".")[0]
        if name not in names and not open_ended:
            raise ShapeError(f"dynamic_dims names {name!r}, which is no argument; {nearest(name, names)}")
        if isinstance(dims, (str, bytes)) or not all(isinstance(dim, int) for dim in dims):
            raise ShapeError(f"dynamic_dims[{path!r}] must be a list of dims, got {dims!r}")


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    for part in signature.parameters.values():
        if part.kind is part.VAR_KEYWORD:
            arguments.update(arguments.pop(part.name, {}))
    return arguments


def _marks(arguments: dict[str, Any], dynamic_dims: DynamicDims) -> list[tuple[torch.Tensor, int]]:
    marks = []
    for path, dims in dynamic_dims.items():
        name, *rest = path.split(".")
        value = arguments.get(name)
        for part in rest:
            value = _step(value, part, path)
        if value is None:
            # An optional argument that was not given.
            continue
        if not isinstance(value, torch.Tensor):
            raise ShapeError(f"dynamic_dims[{path!r}] is a {type(value).__name__}, not a tensor")
        for dim in dims:
            if not -value.dim() <= dim < value.dim():
                raise ShapeError(f"dynamic_dims[{path!r}]: dim {dim} does not exist in a tensor of {value.dim()} dims")
            marks.append((value, dim % value.dim()))
    return marks


def _step(value: Any, part: str, path: str) -> Any:
    """One component of a dotted path: a key, an index or an attribute."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        if part not in value:
            raise ShapeError(f"dynamic_dims[{path!r}]: no key {part!r}; {nearest(part, map(str, value))}")
        return value[part]
    if isinstance(value, (tuple, list)) and part.isdigit():
        if int(part) >= len(value):
            raise ShapeError(f"dynamic_dims[{path!r}]: no item {part} in a sequence of {len(value)}")
        return value[int(part)]
    if not hasattr(value, part):
        raise ShapeError(f"dynamic_dims[{path!r}]: {type(value).__name__} has no attribute {part!r}")
    return getattr(value, part)
