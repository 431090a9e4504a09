"""Tensor descriptors of keys and values for the copy engine (TMA) of a Hopper GPU.

With a descriptor one thread requests a whole tile, and no thread holds addresses in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Places = tuple[int, int, int]


def places_of(tensor: torch.Tensor) -> Places | None:
    """Return rows per sample, rows per head and columns per head of [B, S, N, D] as a 2-D table, or None.

    A row is a token. The heads of a token are adjacent columns, or, if heads come first in memory, start some rows apart.
    None if the engine cannot read the tensor: it needs a non-empty table with a constant row stride, and units of 16 bytes.
    """
    heads, width = tensor.shape[2:]
    by_batch, by_head = (0 if tensor.shape[dim] == 1 else tensor.stride(dim) for dim in (0, 2))
    by_token = _row_stride(tensor)
    units = [place * tensor.element_size() % 16 for place in (by_batch, by_token, by_head)]
    if tensor.numel() == 0 or any(units) or tensor.data_ptr() % 16 or by_token < width or by_batch % by_token:
        return None
    rows_head, columns_head = (by_head // by_token, 0) if by_head % by_token == 0 else (0, by_head)
    places = by_batch // by_token, rows_head, columns_head
    beyond = columns_head * (heads - 1) + width > by_token or _rows(tensor, places) >= 2**31
    return None if beyond else places


def _row_stride(tensor: torch.Tensor) -> int:
    # The stride of a dim of size 1 is arbitrary.
    return tensor.shape[3] if tensor.shape[1] == 1 else tensor.stride(1)


def _rows(tensor: torch.Tensor, places: Places) -> int:
    return (tensor.shape[0] - 1) * places[0] + (tensor.shape[2] - 1) * places[1] + tensor.shape[1]


def table(tensor: torch.Tensor, places: Places | None, tile: int) -> Any:
    """Return a descriptor for tiles of `tile` tokens of one head; None if `places` is None."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if places is None:
        return None
    heads, width = tensor.shape[2:]
    columns = places[2] * (heads - 1) + width
    return TensorDescriptor(tensor, [_rows(tensor, places), columns], [_row_stride(tensor), 1], [tile, width])


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether a device is Hopper or a large Blackwell.

    Smaller GPUs with a copy engine lack the shared memory for the tiles of `launch_options`.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
