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


def under_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function whose tensor arguments are cast to the dtype of their device's autocast, if that is on."""

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        where = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), "")
        if where not in ("cpu", "cuda") or not torch.is_autocast_enabled(where):
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(where)
        with torch.autocast(where, enabled=False):
            named: Any = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return function(*(_cast(value, dtype) for value in args), **named)

    return called


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value
