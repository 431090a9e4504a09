"""`residual_norm_modulate` on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tritium.ops import cpp, rows
from tritium.ops.launch import call
from tritium.ops.residual_norm_modulate.arguments import decline_form
from tritium.ops.residual_norm_modulate.reference import fake

SOURCE = Path(__file__).with_name("kernel.cpp")
# The struct `Given`.
LAYOUT = 41 * "q" + "d"


def run_cpu(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    residual, out = fake(x, y, gate, weight, bias, scale, shift, eps, norm, residual_dtype, out_dtype)
    if out.numel() == 0:
        return residual, out
    if x.dtype != y.dtype:
        x, y = x.float(), y.float()
    shape = x.shape
    x, y = rows.as_dense_rows(x, shape), rows.as_dense_rows(y, shape)
    parts = [None if part is None else rows.as_rows(part, shape) for part in (gate, weight, bias, scale, shift)]
    batches, tokens, width = x.shape
    call(
        cpp.packed(SOURCE, "residual_norm_modulate", LAYOUT),
        x,
        *x.stride()[:2],
        y,
        *y.stride()[:2],
        residual,
        out,
        *(number for part in parts for number in _numbers(part)),
        batches,
        tokens,
        width,
        norm == "layer",
        *(part.dtype == torch.bfloat16 for part in (x, residual, out)),
        cpp.threads(out.numel()),
        eps,
    )
    return residual, out


def _numbers(part: torch.Tensor | None) -> tuple[Any, ...]:
    return (0,) * 5 if part is None else (part, part.dtype == torch.bfloat16, *part.stride())


def decline_cpu(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> str | None:
    del eps
    tensors = (x, y, gate, weight, bias, scale, shift)
    dtypes = [part.dtype for part in tensors if part is not None]
    return (
        decline_form(x, y, (gate, scale, shift), norm)
        or cpp.cannot_read(*dtypes, residual_dtype, out_dtype)
        or cpp.cannot_run(*tensors)
    )
