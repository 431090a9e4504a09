"""Count floating-point operations of contractions (products, convolutions, attention) from shapes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx

from tritium import compat, ops
from tritium.ops.op import NAMESPACE

# Formula for all attention operators: device-specific variants have separate names.
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention


def _counter() -> Any:
    # `flop_counter` imports Triton, so it is imported only when needed.
    return importlib.import_module("torch.utils.flop_counter")


def flops_of(node: fx.Node) -> int | None:
    """Return the operation count of a traced node; None without a contraction or with unknown shapes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace == NAMESPACE:
        return _flops_of_owned(node, target)
    formulas = _counter().flop_registry
    formula = formulas.get(target.overloadpacket)
    if formula is None and target._opname.startswith("_scaled_dot_product"):
        formula = formulas[_ATTENTION]
    if formula is None:
        return None
    try:
        shapes = fx.map_arg(node.args, lambda source: _shape(source.meta["val"]))
        # torch's formulas accept shapes in place of tensors.
        return int(formula(*shapes, out_val=_shape(node.meta["val"])))
    except Exception:  # noqa: BLE001 - torch's formulas assume things about arguments; a missing count is harmless
        return None


def _shape(value: Any) -> tuple[int, ...]:
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(_size(size) for size in first.shape)


def _size(size: Any) -> int:
    known = size if isinstance(size, int) else compat.dynamo.size_hint(size)
    if known is None:
        raise TypeError("the size is not known before the model runs")
    return known


def _flops_of_owned(node: fx.Node, target: torch._ops.OpOverload) -> int | None:
    """Count the contractions of the op's reference by running it on meta tensors."""
    op = ops.catalog().get(target._opname)
    if op is None:
        return None

    def empty(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(_shape(value), dtype=value.dtype, device="meta")

    counter = _counter().FlopCounterMode(display=False)
    try:
        with counter:
            op.reference(*fx.map_arg(node.args, empty))
    except Exception:  # noqa: BLE001 - a reference may not run on meta tensors; the report then uses bytes
        return None
    return counter.get_total_flops() or None


def bytes_of(values: Any) -> int:
    """Return the bytes of tensors of a node's value, with hints for dynamic sizes; unknown ones count as 0."""
    if isinstance(values, (tuple, list)):
        return sum(bytes_of(value) for value in values)
    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        return 0
    total = values.dtype.itemsize
    for size, stride in zip(values.shape, values.stride(), strict=True):
        # An expanded dim is read once.
        if isinstance(stride, int) and stride == 0:
            continue
        total *= (size if isinstance(size, int) else compat.dynamo.size_hint(size)) or 0
    return total
