"""Check and cast the arguments of layer functions.

`@checked` raises for a value that is not of its parameter's annotation, and for tensors that are not of floating point or
not on one device; `@checked_with_stored` also takes tensors of quantized values. Each layer checks the shapes that it needs.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError, nearest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Integers would be truncated, complex numbers lose their imaginary part, and 8-bit floats need scales.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# May be boolean: `attention_forward` checks its dtype.
MASK = "attn_mask"

# The accepted types where they are not the annotation.
_TYPES: dict[Any, tuple[type, ...]] = {
    int: (numbers.Integral, torch.SymInt),
    float: (numbers.Real, torch.SymFloat, torch.SymInt),
    Literal: (str,),
    Sequence: (list, tuple),
    tuple: (list, tuple),
    Any: (object,),
}


# A tuple, because Dynamo traces checks of objects that are created in the graph.
class Kind(NamedTuple):
    """The values that one parameter takes."""

    types: tuple[type, ...]
    # The accepted strings; any if empty.
    strings: tuple[str, ...]
    words: str

    @classmethod
    def of(cls, annotation: Any, text: str) -> Kind:
        parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        origins = [get_origin(part) or part for part in parts]
        accepted = tuple(kind for origin in origins for kind in _TYPES.get(origin, (origin,)))
        strings = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
        return cls(accepted, strings, f"one of {', '.join(strings)}" if strings else text)

    @property
    def is_tensor(self) -> bool:
        return self.types in ((torch.Tensor,), (torch.Tensor, type(None)))


def checked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that checks its arguments first."""
    return _checked(function, frozenset())


def checked_with_stored(*names: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return `checked` for functions with tensors of quantized values, whose dtypes they check themselves."""
    return lambda function: _checked(function, frozenset(names))


def _checked(function: Callable[Parameters, Result], stored: frozenset[str]) -> Callable[Parameters, Result]:
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    kinds = {name: Kind.of(hints[name], parameters[name].annotation) for name in names if name in hints}
    tensor_names = frozenset(name for name, kind in kinds.items() if kind.is_tensor)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        tensors = {}
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            # Python itself raises for unknown names; `self` has no annotation.
            if name in kinds:
                _check(name, value, kinds[name])
            if name in tensor_names and value is not None:
                tensors[name] = value
        check_tensors(tensors, stored)
        return function(*args, **kwargs)

    return call


def _check(name: str, value: Any, kind: Kind) -> None:
    if not isinstance(value, kind.types):
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise ArgumentTypeError(f"{name} must be {kind.words}, got {shown}")
    if kind.strings and isinstance(value, str) and value not in kind.strings:
        raise ArgumentError(f"there is no {name} {value!r}; {nearest(value, kind.strings)}")


def check_tensors(tensors: Mapping[str, Any], stored: frozenset[str] = frozenset()) -> None:
    """Raise unless tensors have dtypes that layers compute with, and are on one device; `stored` may have any dtype."""
    where = None
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING and name != MASK and name not in stored:
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
    # Not by `in`: Dynamo takes equal symbolic sizes for different ones.
    if len(own) > len(shape) or not all(size == 1 or size == wanted for size, wanted in pairs):  # noqa: PLR1714
        raise ArgumentError(f"{name} of shape {own} cannot be broadcast to {tuple(shape)}")


def refuse_gradients_in_a_graph(name: str, *tensors: torch.Tensor) -> None:
    """Raise if gradients are needed in a compiled graph.

    The graph calls this function as one operator without a backward: gradients would be lost silently.
    """
    if torch.compiler.is_compiling() and compat.dynamo.needs_gradients(*tensors):
        raise ArgumentError(
            f"{name} computes no gradients inside of a compiled graph: call it outside of one, or under torch.no_grad()"
        )


def under_autocast(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that applies autocast as PyTorch's scaled_dot_product_attention does.

    Its tensors are cast to autocast's dtype. Inside it autocast is off: some products are in float32 on purpose.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        where = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if where not in ("cpu", "cuda") or not torch.is_autocast_enabled(where):
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(where)
        with torch.autocast(where, enabled=False):
            named: Any = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return function(*(_cast(value, dtype) for value in args), **named)

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value
