"""Matrix products that Inductor or torch lacks: added in place, and wider than their operands."""

from __future__ import annotations

import importlib
from typing import Any

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


def lower_to_product_in_place(overload: Any) -> None:
    """Let Inductor compute an operator (sum, left, right) as `sum.addmm_(left, right)`.

    This applies only if no other operator reads the sum. Inductor's `addmm` writes to new memory, into which cuBLAS
    copies the sum first.
    """
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    ir: Any = importlib.import_module("torch._inductor.ir")
    graph: Any = importlib.import_module("torch._inductor.virtualized").V
    if overload in lowering.lowerings:
        return

    @lowering.register_lowering(overload, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def added(total: Any, left: Any, right: Any) -> Any:
        source = graph.graph.current_node.args[0]
        # Another operator wrote the sum to memory, and only this one reads it.
        owned = len(source.users) == 1 and source.op == "call_function"
        if not owned or not ir.is_storage_and_layout(total):
            return lowering.lowerings[torch.ops.aten.addmm.default](total, left, right)
        ir.FallbackKernel.create(torch.ops.aten.addmm_.default, total, left, right)
        return total


def linear_gelu(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the tanh GELU of `F.linear(rows, weight, bias)`, computed in the product's epilogue on a GPU."""
    return torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
