"""What the kernels of `residual_norm_modulate` ask of its arguments."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tritium.ops.residual_norm_modulate.reference import NORMS


def decline_form(x: torch.Tensor, y: torch.Tensor, modulation: Iterable[torch.Tensor | None], norm: str) -> str | None:
    """Why no kernel takes tensors of these ranks, or this norm, or None."""
    if norm not in NORMS:
        return f"the kernel knows the norms {', '.join(NORMS)}, not {norm!r}"
    if x.dim() == 0 or x.dim() != y.dim():
        return f"the kernel takes x and y of one shape [..., H], got ranks {x.dim()} and {y.dim()}"
    if any(part.dim() > x.dim() for part in modulation if part is not None):
        return f"the kernel broadcasts gate, scale and shift against x, which has rank {x.dim()} only"
    return None
