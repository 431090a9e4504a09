"""Even out strides of dims of size one before Dynamo guards on them, so that blocks share code.

A slice along the tokens of a batch of one is contiguous, but its batch stride is that of the full tensor. The stride is
never used, yet Dynamo guards on it: the first of FLUX's single-stream blocks, whose input is a new tensor, would be
compiled apart from the others, whose inputs are slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat


def evened(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled call: tensors with a batch of one get the strides of a new tensor.

    Every block of every step goes through this, so it does as little as possible.
    """

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if compat.dynamo.is_compiling():
            # An outer graph is being traced: Dynamo guards on nothing here.
            return call(*args, **kwargs)
        if any(map(_is_uneven, args)):
            args = tuple(map(even, args))
        for name, value in kwargs.items():
            if _is_uneven(value):
                kwargs[name] = even(value)
        return call(*args, **kwargs)

    return run


def even(value: Any) -> Any:
    """Return the value, with contiguous strides if only the stride of a batch of one differs."""
    if not _is_uneven(value) or value.numel() == 0 or not value.is_contiguous():
        return value
    # A view would add an autograd node and lose attributes of the tensor, such as marked dims.
    if value.requires_grad or value.__dict__:
        return value
    return value.as_strided(value.shape, (value.numel(), *value.stride()[1:]))


def _is_uneven(value: Any) -> bool:
    """Return True if a batch of one has another stride than in a new tensor."""
    if type(value) is not torch.Tensor:
        return False
    stride: tuple[int, ...] = value.stride()
    return len(stride) > 1 and stride[0] != value.numel() and value.size(0) == 1
