"""Apply autocast to functions that compute attention, as to PyTorch's scaled_dot_product_attention.

Their tensors are cast to autocast's dtype. Inside them autocast is off: some products are in float32 on purpose.
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
    """Return the dtype that autocast uses on a device now, or None if it is off."""
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
