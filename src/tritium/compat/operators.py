"""Classes, names and schemas of torch's operators, attributes of graph nodes, and private operators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator

# The attention operator for which torch has a formula of operations.
FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention

# The product of float8 matrices with scales.
SCALED_PRODUCT: Any = torch._scaled_mm

# The functions of torch.nn that are implemented in C++: `F.linear` is one of them.
NN: Any = torch._C._nn


def operator_of(node: fx.Node) -> OpOverload | None:
    """Return the operator that a node calls; None for Python functions, methods, inputs and outputs."""
    return node.target if isinstance(node.target, OpOverload) else None


def qualified_name(function: Any) -> str:
    """Return the path by which generated code calls a function: `torch.nn.functional.rms_norm`."""
    return _get_qualified_name(function)


def is_mutable(target: Any) -> bool:
    """Return True for an operator that writes to an argument, according to its schema."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def overload_of(definition: Any) -> OpOverload:
    """Return the operator that `torch.library.custom_op` defined."""
    overload: OpOverload = definition._opoverload
    return overload


def is_erased(node: fx.Node) -> bool:
    """Return True if a node was erased from its graph."""
    return bool(node._erased)


def copy_source(node: fx.Node, original: fx.Node) -> bool:
    """Copy Dynamo's source of a graph input to another node; return False if there is none."""
    if not hasattr(original, "_dynamo_source"):
        return False
    node._dynamo_source = original._dynamo_source
    return True


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


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return `rows @ weight.T` of [M, K] and [E, N, K], in groups of rows that end at the offsets [E]."""
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    result: torch.Tensor = product(rows, weights.transpose(-1, -2), offs=offsets)
    return result


def int8_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `rows @ weight.T` of int8 [M, K] and [N, K] as int32."""
    return torch._int_mm(rows, weight.t())


@functools.cache
def int8_products_are_exact() -> bool:
    """Return True if a product of int8 matrices on the CPU is exact for the largest values.

    Without VNNI instructions oneDNN adds pairs of products in 16 bits, which saturate without a message. CPU flags do not
    tell: an environment variable limits the instructions that oneDNN uses.
    """
    for rows in (1, 64):
        left, right = torch.full((rows, 256), 127, dtype=torch.int8), torch.full((64, 256), 127, dtype=torch.int8)
        left[:, ::3] = -127
        for sign in (1, -1):
            if not torch.equal(int8_product(left, sign * right).long(), left.long() @ (sign * right.t()).long()):
                return False
    return True


def scaled_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    """Return `rows @ weight.T` of float8 [M, K] and [N, K] with scales [M, 1] and [N, 1].

    `fast` sums in the tensor cores' own precision. The first version of the operator: torch 2.11 cannot lower the second.
    """
    return torch._scaled_mm(
        rows, weight.t(), scale, weight_scale.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast
    )
