"""Call a compiled VAE encoder or decoder with images, tiles and frames of all sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compiler.compile import marking


class AnySize:
    """Call a compiled module after marking the sizes that vary and evening out memory formats.

    `dims` are the dims that vary with the image, by argument; the first argument is the image.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], dims: Mapping[str, Sequence[int]]) -> None:
        self._eager: Callable[..., Any] = module._call_impl
        self._signature = inspect.signature(module.forward)
        self._picture = next(iter(dims))
        # Mark weakly: a model that branches on a size is compiled again for the other branch, which is correct.
        self._compiled = marking(compiled, self._signature, dims, weakly=True)
        # Calls that ran eagerly because the image was a single row or column.
        self.slivers = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        picture = bound.arguments.get(self._picture)
        if not isinstance(picture, torch.Tensor) or compat.dynamo.is_compiling():
            return self._compiled(*args, **kwargs)
        if min(picture.shape[-2:]) < 2:
            # The last tile may be one latent pixel wide. Dynamo specialises sizes of one: three more compilations, and
            # three times that with a frame cache, for the cheapest calls.
            self.slivers += 1
            return self._eager(*args, **kwargs)
        bound.arguments[self._picture] = packed(picture)
        return self._compiled(*bound.args, **bound.kwargs)


def packed(picture: torch.Tensor) -> torch.Tensor:
    """Return a frame or tile with contiguous strides: a copy if it is a slice of a larger tensor."""
    layouts = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(picture.dim(), ())
    if any(picture.is_contiguous(memory_format=layout) and not picture.is_contiguous() for layout in layouts):
        return picture
    strides = [1]
    for size in reversed(picture.shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    # Compare strides exactly: dims of size one may have any stride and still count as contiguous.
    if picture.stride() == tuple(strides):
        return picture
    return picture.clone(memory_format=torch.contiguous_format)
