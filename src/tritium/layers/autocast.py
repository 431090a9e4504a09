"""What autocast means to a function that computes attention: what it means to PyTorch's own.

Its tensors come in autocast's dtype, whoever computes; and inside, where products are in float32 on purpose, nothing is cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What tensors are cast to on a device now, if they are."""
    if device_type in DEVICES and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def as_autocast_has_it(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        where = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), "")
        dtype = autocast_dtype(where)
        if dtype is None:
            return function(*args, **kwargs)
        with torch.autocast(where, enabled=False):
            given = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return function(*(_cast(value, dtype) for value in args), **given)

    return called


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value
