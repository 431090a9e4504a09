"""Blocks of one class share their code: strides that say nothing are made equal before Dynamo guards on them.

A slice of the tokens of a batch of one is as contiguous as a tensor of its own, but the stride of its batch is that of the
whole it was cut from. Nothing ever steps over it, and Dynamo guards on it: the first of FLUX's single-stream blocks, whose
input is a tensor of its own, would be compiled apart from the others, whose inputs are slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat


def evened(call: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled call whose tensors of batch one have the strides of tensors of their own.

    This is in the way of every block of every step, so it does as little as it can.
    """

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if compat.is_compiling():
            # Inside somebody else's graph nothing is guarded here.
            return call(*args, **kwargs)
        if any(map(_is_uneven, args)):
            args = tuple(map(even, args))
        for name, value in kwargs.items():
            if _is_uneven(value):
                kwargs[name] = even(value)
        return call(*args, **kwargs)

    return run


def even(value: Any) -> Any:
    """The value, or the same memory under the strides of a contiguous tensor where only its batch of one differs."""
    if not _is_uneven(value) or value.numel() == 0 or not value.is_contiguous():
        return value
    # A view would be one more step for autograd, and lose what hangs on the tensor: dims that were marked, for one.
    if value.requires_grad or value.__dict__:
        return value
    return value.as_strided(value.shape, (value.numel(), *value.stride()[1:]))


def _is_uneven(value: Any) -> bool:
    """Whether the stride of a batch of one is another than that of a tensor of its own."""
    if type(value) is not torch.Tensor:
        return False
    stride: tuple[int, ...] = value.stride()
    return len(stride) > 1 and stride[0] != value.numel() and value.size(0) == 1
