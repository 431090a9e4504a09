"""Memory formats of images and videos: contiguous or channels-last."""

from __future__ import annotations

import torch

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: torch.Tensor) -> bool:
    """Return whether an image or video is channels-last; a tensor with both formats counts as contiguous."""
    # Use torch's flags, which also exist for symbolic sizes. They ignore strides of dims of size 1, unlike ATen's GroupNorm,
    # and so does `contiguous(memory_format=...)`, with which a channels-last region starts: by ATen's rule some of these
    # tensors would not count as channels-last, and the region would end at its first operation.
    return x.ndim in FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=FORMATS[x.ndim])


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x` with the channels of a pixel together in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def empty_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor for a result: channels-last if `x` is channels-last, else contiguous."""
    if not is_channels_last(x):
        return x.new_empty(x.shape, dtype=dtype)
    # Use explicit strides, which Inductor keeps; it may change the layout of `empty_like`.
    _, channels, *sizes = x.shape
    steps = [channels]
    for size in reversed(sizes[1:]):
        steps.append(steps[-1] * size)
    strides = (steps[-1] * sizes[0], 1, *reversed(steps))
    return x.new_empty_strided(x.shape, strides, dtype=dtype)


def laid_as(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out`, copied if its strides differ from those of `empty_as(x)`."""
    promised = empty_as(x, out.dtype)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def with_offset(x: torch.Tensor, offset: torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """Return `x` plus one offset per channel, in the dtype of `x`."""
    if offset is None:
        return x
    return x + offset.to(x.dtype).view([-1 if index == dim % x.ndim else 1 for index in range(x.ndim)])
