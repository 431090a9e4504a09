"""Mark dims of arguments as dynamic, by name: `{"hidden_states": [1], "feat_cache.*": [-2, -1]}`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tritium import compat
from tritium.errors import ShapeError, nearest

DynamicDims = Mapping[str, Sequence[int]]


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
            if value is None:
                # An omitted optional argument.
                continue
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
    """Return the values at a dotted path: one value, or every item for a star."""
    for place, part in enumerate(parts):
        if part == "*" and value is not None:
            if not isinstance(value, (Mapping, tuple, list)):
                raise ShapeError(f"dynamic_dims[{path!r}]: a {type(value).__name__} has no items")
            items = value.values() if isinstance(value, Mapping) else value
            rest = parts[place + 1 :]
            # Skip non-tensors at the end of a path: a cache that is filled call by call contains them.
            held = items if rest else [item for item in items if isinstance(item, torch.Tensor)]
            for item in held:
                yield from _reached(item, rest, path)
            return
        value = _step(value, part, path)
    yield value


def _step(value: Any, part: str, path: str) -> Any:
    """Follow one component of a dotted path: a key, an index or an attribute."""
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
