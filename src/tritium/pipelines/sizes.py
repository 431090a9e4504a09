"""The compiled call of a VAE's encoder or decoder: pictures, tiles and frames of every size through the same graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compiler.mark import marking


class AnySize:
    """Calls what was compiled, after saying which sizes vary and making all tensors look alike in memory.

    `dims` are the dims that change from picture to picture, by argument; the first of them is the picture.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], dims: Mapping[str, Sequence[int]]) -> None:
        self._eager: Callable[..., Any] = module._call_impl
        self._signature = inspect.signature(module.forward)
        self._picture = next(iter(dims))
        # Weakly: a model that branches on a size is compiled again for the other branch, and is right.
        self._compiled = marking(compiled, self._signature, dims, weakly=True)
        # Calls that ran eagerly because the picture was a single row or column.
        self.slivers = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        picture = bound.arguments.get(self._picture)
        if not isinstance(picture, torch.Tensor) or compat.is_compiling():
            return self._compiled(*args, **kwargs)
        if min(picture.shape[-2:]) < 2:
            # The last tile may be one latent pixel wide. Dynamo compiles sizes of one apart from all others: three more
            # times, and three times that with a cache of frames, for the least work of all.
            self.slivers += 1
            return self._eager(*args, **kwargs)
        bound.arguments[self._picture] = packed(picture)
        return self._compiled(*bound.args, **bound.kwargs)


def packed(picture: torch.Tensor) -> torch.Tensor:
    """A frame or tile is a slice, whose strides are those of the whole; copied, they follow from its own sizes."""
    layouts = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(picture.dim(), ())
    if any(picture.is_contiguous(memory_format=layout) and not picture.is_contiguous() for layout in layouts):
        return picture
    strides = [1]
    for size in reversed(picture.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    # Asked for exactly: dims of size one may have any stride and still count as contiguous.
    if picture.stride() == tuple(strides):
        return picture
    return picture.clone(memory_format=torch.contiguous_format)
