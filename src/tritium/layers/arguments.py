"""Check the arguments of layer functions by the annotations of their parameters.

`@checked` raises for a value of another type, for a string that is not in the parameter's `Literal`, and for tensors that
are not of floating point or not on one device. Each layer checks the shapes that it needs.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError, nearest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Integers would be truncated, complex numbers lose their imaginary part, and 8-bit floats need scales.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The types of values for an annotation, and how errors describe them.
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    torch.Tensor: ((torch.Tensor,), "a tensor"),
    bool: ((bool,), "True or False"),
    int: ((numbers.Integral, torch.SymInt), "an integer"),
    float: ((numbers.Real, torch.SymFloat, torch.SymInt), "a number"),
    str: ((str,), "a string"),
    type(None): ((type(None),), "None"),
    Any: ((object,), "anything"),
}


# A tuple, because Dynamo traces checks of objects that are created in the graph.
class Kind(NamedTuple):
    """The values that one parameter takes."""

    types: tuple[type, ...]
    words: tuple[str, ...]
    # The accepted strings; any if empty.
    strings: tuple[str, ...] = ()
    # Whether it is an integer: bool is a subclass of int.
    integer: bool = False
    # Whether it is a tensor, or None: of floating point, and on the device of the others.
    tensor: bool = False


def _check(name: str, value: Any, kind: Kind) -> None:
    if not isinstance(value, kind.types) or (kind.integer and isinstance(value, bool)):
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise ArgumentTypeError(f"{name} must be {' or '.join(kind.words)}, got {shown}")
    if kind.strings and isinstance(value, str) and value not in kind.strings:
        raise ArgumentError(f"there is no {name} {value!r}; {nearest(value, kind.strings)}")


def _kind(annotation: Any) -> Kind:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        parts = [_kind(part) for part in get_args(annotation)]
        return Kind(
            tuple(one for part in parts for one in part.types),
            tuple(words for part in parts for words in part.words),
            tuple(string for part in parts for string in part.strings),
            any(part.integer for part in parts),
            all(part.tensor or part.types == (type(None),) for part in parts),
        )
    if origin is Literal:
        return Kind((str,), (f"one of {', '.join(get_args(annotation))}",), get_args(annotation))
    if origin in (Sequence, tuple):
        return Kind((list, tuple), ("a list",))
    if origin is not None or annotation not in _TYPES:
        kind = origin or annotation
        return Kind((kind,), (f"a {kind.__qualname__}",))
    accepted, words = _TYPES[annotation]
    return Kind(accepted, (words,), integer=annotation is int, tensor=annotation is torch.Tensor)


@overload
def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]: ...


@overload
def checked(
    *, any_dtype: tuple[str, ...]
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]: ...


def checked(function: Any = None, *, any_dtype: tuple[str, ...] = ()) -> Any:
    """Return a function that checks its arguments first; tensors named in `any_dtype` may have any dtype."""
    if function is None:
        return functools.partial(checked, any_dtype=any_dtype)
    hints = get_type_hints(function)
    names = tuple(inspect.signature(function).parameters)
    kinds = {name: _kind(hints[name]) for name in names if name in hints}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            # Python itself raises for unknown names; `self` has no annotation.
            if name not in kinds:
                continue
            _check(name, value, kinds[name])
            if kinds[name].tensor and value is not None:
                tensors[name] = value
        check_tensors(tensors, any_dtype)
        return function(*args, **kwargs)

    return call


def check_tensors(tensors: Mapping[str, torch.Tensor], any_dtype: Iterable[str] = ()) -> None:
    """Raise unless tensors have dtypes that layers compute with, and are on one device."""
    where = None
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING and name not in any_dtype:
            raise ArgumentTypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if where is not None and tensor.device != where:
            listed = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise ArgumentError(f"all tensors must be on one device, got {listed}")
        where = tensor.device


def check_shape(name: str, value: torch.Tensor | None, wanted: tuple[int, ...]) -> None:
    if value is not None and tuple(value.shape) != wanted:
        raise ArgumentError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")


def check_rank(name: str, value: torch.Tensor, *accepted: int) -> None:
    if value.dim() not in accepted:
        ranks = " or ".join(map(str, accepted))
        raise ArgumentError(f"{name} must have rank {ranks}, got {value.dim()}: shape {tuple(value.shape)}")


def check_broadcast(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor can be broadcast to exactly this shape."""
    own = tuple(value.shape)
    pairs = zip(reversed(own), reversed(shape), strict=False)
    if len(own) > len(shape) or not all(size in (1, wanted) for size, wanted in pairs):
        raise ArgumentError(f"{name} of shape {own} cannot be broadcast to {tuple(shape)}")


def refuse_gradients_in_a_graph(name: str, *tensors: torch.Tensor) -> None:
    """Raise if gradients are needed in a compiled graph.

    The graph calls this function as one operator without a backward: gradients would be lost silently.
    """
    if torch.compiler.is_compiling() and compat.dynamo.needs_gradients(*tensors):
        raise ArgumentError(
            f"{name} computes no gradients inside of a compiled graph: call it outside of one, or under torch.no_grad()"
        )


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ArgumentError(f"{name} must be {least} or more, got {value}")
