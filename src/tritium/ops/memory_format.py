"""How pictures and videos lie in memory: contiguous, or with the channels of a pixel together."""

from __future__ import annotations

import torch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether the channels of an image's or a video's pixel lie together; a tensor that is both counts as contiguous."""
    # By torch's own flags: a traced tensor of symbolic sizes has them, and a permuted one would have to work out its own.
    # They leave out strides of dims of size one, which ATen's GroupNorm looks at. So does `contiguous(memory_format=...)`,
    # which a region that was laid out channels-last begins with: by ATen's rule some would end where they begin.
    return x.ndim in FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=FORMATS[x.ndim])


def empty_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result that lies as `x` does: channels last if `x` is channels last, else contiguous."""
    if not is_channels_last(x):
        return x.new_empty(x.shape, dtype=dtype)
    # By strides: Inductor fills what `empty_like` makes in another layout, and leaves this as it is.
    _, channels, *sizes = x.shape
    steps = [channels]
    for size in reversed(sizes[1:]):
        steps.append(steps[-1] * size)
    strides = (steps[-1] * sizes[0], 1, *reversed(steps))
    return x.new_empty_strided(x.shape, strides, dtype=dtype)


def laid_as(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out`, copied where it does not lie as such a result."""
    promised = empty_as(x, out.dtype)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def with_offset(x: torch.Tensor, offset: torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """`x` with one number a channel added, in the dtype of `x`."""
    if offset is None:
        return x
    return x + offset.to(x.dtype).view([-1 if index == dim % x.ndim else 1 for index in range(x.ndim)])
