"""`group_norm_silu` on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tritium.ops import cpp
from tritium.ops.memory_format import empty_as, is_channels_last

SOURCE = Path(__file__).with_name("kernel.cpp")
ARGUMENTS = (*[cpp.POINTER] * 4, *[cpp.INTEGER] * 4, cpp.FLOAT, *[cpp.INTEGER] * 4)


def run_cpu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    assert offset is None
    out = empty_as(x, out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    channels_last = is_channels_last(x)
    x = x if channels_last else x.contiguous()
    affine = [None if part is None else part.float().contiguous() for part in (weight, bias)]
    images, channels = x.shape[:2]
    cpp.function(SOURCE, "group_norm_silu", ARGUMENTS)(
        x.data_ptr(),
        out.data_ptr(),
        *(None if part is None else part.data_ptr() for part in affine),
        images,
        channels,
        x.numel() // (images * channels),
        groups,
        eps,
        channels_last,
        x.dtype == torch.bfloat16,
        out.dtype == torch.bfloat16,
        cpp.threads(x.numel()),
    )
    return out


def decline_cpu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> str | None:
    del groups, eps
    if offset is not None:
        return "the kernel adds no offset: on a CPU a convolution adds its bias itself"
    return cpp.cannot_read(x.dtype, out_dtype) or cpp.cannot_run(x, weight, bias)
