"""What every Triton provider asks before a launch."""

from __future__ import annotations

import torch

from tritium import device, envs

NARROW = (torch.float16, torch.bfloat16, torch.float32)


def cannot_launch(*tensors: torch.Tensor | None) -> str | None:
    """Why a Triton kernel that computes in float32 cannot take these tensors, or None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not device.has_triton():
        return "triton is not installed"
    elsewhere = {tensor.device.type for tensor in given} - {"cuda"}
    if elsewhere and not envs.triton_interpreted():
        return f"Triton kernels run on a GPU, this graph runs on {', '.join(sorted(elsewhere))}"
    wide = {str(tensor.dtype) for tensor in given if tensor.dtype not in NARROW}
    return f"the kernel computes in float32, an input is {', '.join(sorted(wide))}" if wide else None
