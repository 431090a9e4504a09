"""Matrix products that torch lacks: with a result wider than the operands, or with an activation."""

from __future__ import annotations

import torch

from tritium.compat.versions import version_text


def wide_product_obstacle() -> str | None:
    """Return why half-precision matrices cannot be multiplied into float32 in this version, or None."""
    if "dtype_out" in torch.ops.aten.bmm.overloads():
        return None
    return f"torch {version_text()} has no batched product of half precision with a float32 result"


def multiply_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write `left @ right` of [N, M, K] and [N, K, P] to `out`, in their dtype or float32; sum in float32."""
    if not left.is_cuda:
        # Only CUDA has a product with a wider result. This serves Triton's interpreter.
        out.copy_(torch.bmm(left.float(), right.float()))
    elif out.dtype == left.dtype:
        torch.bmm(left, right, out=out)
    else:
        torch.ops.aten.bmm.dtype_out(left, right, out.dtype, out=out)


def linear_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the tanh GELU of `F.linear(rows, weight, bias)`, computed in the product's epilogue on a GPU."""
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
