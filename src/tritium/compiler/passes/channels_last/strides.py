"""Query strides of fake tensors and symbolic sizes without adding a guard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tritium import compat
from tritium.graph import same_shape, same_size, tensors_of
from tritium.ops.memory_format import FORMATS
from tritium.ops.op import present


def packed(shape: Sequence[Any]) -> list[Any]:
    """Return the strides of a contiguous tensor; like PyTorch, count an empty dim as size one."""
    ones = [size if not same_size(size, 0) else 1 for size in shape]
    return [math.prod(ones[place + 1 :]) for place in range(len(ones))]


def is_contiguous(value: Any) -> bool:
    """Return True if strides are exactly packed for all values of symbolic sizes; add no guard."""
    return isinstance(value, torch.Tensor) and same_shape(value.stride(), packed(value.shape))


def order_in_memory(value: Any) -> list[int] | None:
    """Return the order of dims, largest stride first, if a tensor is provably packed; else None.

    >>> order_in_memory(torch.empty(2, 3, 4, 5)), order_in_memory(torch.empty(2, 3, 4, 5).permute(0, 3, 1, 2))
    ([0, 1, 2, 3], [0, 2, 3, 1])
    >>> order_in_memory(torch.empty(2, 3, 8)[..., ::2])
    """
    if not isinstance(value, torch.Tensor):
        return None
    if is_contiguous(value):
        return list(range(value.dim()))
    strides = [present(stride) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    shape, stride = ([of_dims[dim] for dim in order] for of_dims in (value.shape, value.stride()))
    return order if same_shape(stride, packed(shape)) else None


def is_channels_last(value: Any) -> bool:
    """Return True if a value is channels-last. The strides of dims of size one do not matter."""
    if not isinstance(value, torch.Tensor) or value.dim() not in FORMATS:
        return False
    shape = [value.shape[0], *value.shape[2:], value.shape[1]]
    strides = [value.stride(0), *value.stride()[2:], value.stride(1)]
    return all(
        same_size(size, 1) or same_size(stride, wanted)
        for size, stride, wanted in zip(shape, strides, packed(shape), strict=True)
    )


def same_strides(left: Any, right: Any) -> bool:
    """Return True if two values of the same shape have the same strides for all symbolic sizes."""
    return all(
        same_shape(one.stride(), other.stride()) for one, other in zip(tensors_of(left), tensors_of(right), strict=True)
    )


def same_meta(left: Any, right: Any) -> bool:
    """Return True if two values differ in nothing but strides."""
    ones, others = list(tensors_of(left)), list(tensors_of(right))
    return len(ones) == len(others) and all(
        one.dtype == other.dtype and one.device == other.device and same_shape(one.shape, other.shape)
        for one, other in zip(ones, others, strict=True)
    )


@contextlib.contextmanager
def as_dynamo_does(value: Any) -> Iterator[None]:
    """Compute in a value's fake mode, without specialising more symbolic sizes than Dynamo did."""
    # Without Python's dispatcher, the C++ code of some operators specialises symbolic sizes.
    with compat.tensors.fake_mode_of(value), torch.no_grad(), compat.tensors.python_decompositions():
        yield
