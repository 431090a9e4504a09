"""Check the arguments of layer functions. Every error names the given value and the accepted ones."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import torch

from tritium import compat
from tritium.errors import ArgumentError, ArgumentTypeError, nearest

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, torch.Tensor):
        accepted = "a tensor or None" if optional else "a tensor"
        raise ArgumentTypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise ArgumentTypeError(f"{name} must be a dense tensor, got {kind}")


def numbers_of(**tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors have a dtype that layers compute with.

    Integers would be truncated, complex numbers lose their imaginary part, and 8-bit floats need scales.
    """
    for name, value in tensors.items():
        if value is not None and value.dtype not in FLOATING:
            raise ArgumentTypeError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")


def shape(name: str, value: torch.Tensor | None, wanted: tuple[int, ...]) -> None:
    if value is not None and tuple(value.shape) != wanted:
        raise ArgumentError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")


def size(name: str, value: Any, *, optional: bool = False) -> None:
    whole = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
    if whole or (optional and value is None):
        return
    raise ArgumentTypeError(f"{name} must be a whole number{' or None' if optional else ''}, got {value!r}")


def no_gradients_in_a_graph(name: str, *tensors: torch.Tensor) -> None:
    """Raise if gradients are needed in a compiled graph.

    The graph calls this function as one operator without a backward: gradients would be lost silently.
    """
    if torch.compiler.is_compiling() and needs_gradients(*tensors):
        raise ArgumentError(
            f"{name} computes no gradients inside of a compiled graph: call it outside of one, or under torch.no_grad()"
        )


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether derivatives of the results may be taken."""
    if not torch.compiler.is_compiling() and compat.dynamo.is_transformed():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def needs_tangents() -> bool:
    """Return whether forward-mode derivatives are taken; False in a graph.

    PyTorch's attention kernels do not compute these.
    """
    return not torch.compiler.is_compiling() and compat.dynamo.has_tangents()


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")


def number(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    # Python integers are unbounded.
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ArgumentError(f"{name} must be a number that a float can hold, at most {sys.float_info.max}")
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        accepted = "a number or None" if optional else "a number"
        raise ArgumentTypeError(f"{name} must be {accepted}, got {value!r}")


def text(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
    if value not in accepted:
        raise ArgumentError(f"there is no {name} {value!r}; {nearest(value, accepted)}")


def rank(name: str, value: torch.Tensor, *accepted: int) -> None:
    if value.dim() not in accepted:
        ranks = " or ".join(map(str, accepted))
        raise ArgumentError(f"{name} must have rank {ranks}, got {value.dim()}: shape {tuple(value.shape)}")


def broadcastable(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor can be broadcast to exactly this shape."""
    own = tuple(value.shape)
    fits = len(own) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(reversed(own), reversed(shape), strict=False)
    )
    if not fits:
        raise ArgumentError(f"{name} of shape {own} cannot be broadcast to {tuple(shape)}")


def together(**tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors are on one device."""
    devices = {name: value.device for name, value in tensors.items() if value is not None}
    where = iter(devices.values())
    first = next(where, None)
    if any(other != first for other in where):
        listed = ", ".join(f"{name} on {where}" for name, where in devices.items())
        raise ArgumentError(f"all tensors must be on one device, got {listed}")
