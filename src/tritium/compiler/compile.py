"""`tritium.compile`: torch.compile with this backend, and with dynamic dims named by argument.

    model = tritium.compile(model, dynamic_dims={"hidden_states": [1], "encoder_hidden_states": [-2]})

    @tritium.compile(dynamic_dims={"cfg.inner.t": [0]})
    def step(x, cfg): ...

Named dims may change without a recompile. All other sizes are static, and changing one recompiles.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch

from tritium import compat
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, ShapeError, nearest

T = TypeVar("T")

# Dims that may change, by argument: `{"hidden_states": [1], "feat_cache.*": [-2, -1]}`.
DynamicDims = Mapping[str, Sequence[int]]


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
        optimized: Any = to_compiled(model)
        if dynamic_dims is not None:
            # torch.compile's wrapper calls this attribute.
            optimized.forward = marking(optimized.forward, inspect.signature(model.forward), dynamic_dims)
        return optimized
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


def compile_pinned(function: Callable[..., Any], providers: Mapping[str, str]) -> Callable[..., Any]:
    """Compile a function as one static graph, with a provider pinned by op."""
    backend = Backend(CompilationConfig(force_provider=dict(providers)))
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return compiled


def marking(
    compiled: Callable[..., Any],
    signature: inspect.Signature,
    dynamic_dims: DynamicDims | None,
    wraps: Callable[..., Any] | None = None,
    *,
    weakly: bool = False,
) -> Callable[..., Any]:
    """Wrap a compiled callable so that it marks the named dims of its arguments on each call.

    If the model specialises a marked dim, that is an error; a weakly marked dim is recompiled when it changes.
    """
    if dynamic_dims is None:
        return compiled
    _check_names(signature, dynamic_dims)

    @functools.wraps(wraps or compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compat.dynamo.is_compiling():
            # While another graph is traced, arguments cannot be marked.
            return compiled(*args, **kwargs)
        arguments = _arguments(signature, args, kwargs)
        with compat.dynamo.marked_dynamic(_marks(arguments, dynamic_dims), weakly=weakly):
            return compiled(*args, **kwargs)

    call.__wrapped__ = compiled
    return call


def _check_names(signature: inspect.Signature, dynamic_dims: DynamicDims) -> None:
    if not isinstance(dynamic_dims, Mapping):
        raise ShapeError(f"dynamic_dims maps an argument's name to a list of dims, got {dynamic_dims!r}")
    names = list(signature.parameters)
    open_ended = any(part.kind is part.VAR_KEYWORD for part in signature.parameters.values())
    for path, dims in dynamic_dims.items():
        if not isinstance(path, str):
            raise ShapeError(f"dynamic_dims: an argument is named by a string, got {path!r}")
        name = path.split(".")[0]
        if name not in names and not open_ended:
            raise ShapeError(f"dynamic_dims names {name!r}, which is no argument; {nearest(name, names)}")
        if not isinstance(dims, Sequence) or not all(isinstance(dim, int) for dim in dims):
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
        for value in _reached(arguments.get(name), rest, path):
            if not isinstance(value, torch.Tensor):
                raise ShapeError(f"dynamic_dims[{path!r}] is a {type(value).__name__}, not a tensor")
            for dim in dims:
                if not -value.dim() <= dim < value.dim():
                    raise ShapeError(
                        f"dynamic_dims[{path!r}]: dim {dim} does not exist in a tensor of {value.dim()} dims"
                    )
                marks.append((value, dim % value.dim()))
    return marks


def _reached(value: Any, parts: list[str], path: str) -> Iterator[Any]:
    """Yield the values at a dotted path: one value, or every item for a star; none for an omitted argument."""
    if value is None:
        return
    if not parts:
        yield value
        return
    part, *rest = parts
    if part != "*":
        yield from _reached(_step(value, part, path), rest, path)
        return
    if not isinstance(value, (Mapping, tuple, list)):
        raise ShapeError(f"dynamic_dims[{path!r}]: a {type(value).__name__} has no items")
    for item in value.values() if isinstance(value, Mapping) else value:
        # Skip non-tensors at the end of a path: a cache that is filled call by call contains them.
        if rest or isinstance(item, torch.Tensor):
            yield from _reached(item, rest, path)


def _step(value: Any, part: str, path: str) -> Any:
    """Follow one component of a dotted path: a key, an index or an attribute."""
    try:
        if isinstance(value, Mapping):
            return value[part]
        return value[int(part)] if isinstance(value, (tuple, list)) and part.isdigit() else getattr(value, part)
    except (KeyError, IndexError, AttributeError) as error:
        raise ShapeError(f"dynamic_dims[{path!r}]: {type(value).__name__} has no {part!r}") from error
