"""Prepare the arguments of compiled calls, so that calls that mean the same look the same to Dynamo.

A slice along the tokens of a batch of one is contiguous, but its batch stride is that of the full tensor. The stride is
never used, yet Dynamo guards on it: the first of FLUX's single-stream blocks, whose input is a new tensor, would be
compiled apart from the others, whose inputs are slices. Images, tiles and frames of a VAE come in all sizes, and as
slices of larger tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compiler.compile import marking


def with_even_strides(call: Callable[..., Any]) -> Callable[..., Any]:
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


class AnySize:
    """Call a compiled VAE encoder or decoder after marking the sizes that vary and evening out memory formats.

    `dims` are the dims that vary with the image, by argument; the first argument is the image.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], dims: Mapping[str, Sequence[int]]) -> None:
        self._eager = compat.modules.eager_call(module)
        self._signature = inspect.signature(module.forward)
        self._image = next(iter(dims))
        # Mark weakly: a model that branches on a size is compiled again for the other branch, which is correct.
        self._compiled = marking(compiled, self._signature, dims, weakly=True)
        # Calls that ran eagerly because the image was a single row or column.
        self.slivers = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        image = bound.arguments.get(self._image)
        if not isinstance(image, torch.Tensor) or compat.dynamo.is_compiling():
            return self._compiled(*args, **kwargs)
        if min(image.shape[-2:]) < 2:
            # The last tile may be one latent pixel wide. Dynamo specialises sizes of one: three more compilations, and
            # three times that with a frame cache, for the cheapest calls.
            self.slivers += 1
            return self._eager(*args, **kwargs)
        bound.arguments[self._image] = packed(image)
        return self._compiled(*bound.args, **bound.kwargs)


def packed(image: torch.Tensor) -> torch.Tensor:
    """Return a frame or tile with contiguous strides: a copy if it is a slice of a larger tensor."""
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(image.dim(), ())
    if any(image.is_contiguous(memory_format=form) and not image.is_contiguous() for form in formats):
        return image
    strides = [1]
    for size in reversed(image.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    # Compare strides exactly: dims of size one may have any stride and still count as contiguous.
    if image.stride() == tuple(strides):
        return image
    return image.clone(memory_format=torch.contiguous_format)
