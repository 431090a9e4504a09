"""How many floating-point operations the contractions of a graph take (products, convolutions, attention), from shapes."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx

from tritium import compat, ops
from tritium.ops.op import NAMESPACE

# Every kind of attention counts like this one; the ways a device computes it have names of their own.
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention


def _counter() -> Any:
    # Importing it imports Triton, which nobody should wait for who only imports Tritium.
    return importlib.import_module("torch.utils.flop_counter")


def flops_of(node: fx.Node) -> int | None:
    """Operations of one node of a traced graph; None for one that contracts nothing, or whose shapes are not known."""
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
        # Formulas also take shapes where an operator takes tensors.
        return int(formula(*shapes, out_val=_shape(node.meta["val"])))
    except Exception:  # noqa: BLE001 - torch's formulas assume things about arguments; a count is no reason to fail
        return None


def _shape(value: Any) -> tuple[int, ...]:
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(_size(size) for size in first.shape)


def _size(size: Any) -> int:
    known = size if isinstance(size, int) else compat.size_hint(size)
    if known is None:
        raise TypeError("the size is not known before the model runs")
    return known


def _flops_of_owned(node: fx.Node, target: torch._ops.OpOverload) -> int | None:
    """What the op's reference contracts, run on tensors without storage."""
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
    except Exception:  # noqa: BLE001 - a reference need not run without storage: then its bytes place the kernel
        return None
    return counter.get_total_flops() or None


def bytes_of(values: Any) -> int:
    """Bytes of the tensors in a node's value, dynamic sizes by their hint; a size that is not known counts as nothing."""
    if isinstance(values, (tuple, list)):
        return sum(bytes_of(value) for value in values)
    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        return 0
    total = values.dtype.itemsize
    for size, stride in zip(values.shape, values.stride(), strict=True):
        # An expanded dimension is read once.
        if isinstance(stride, int) and stride == 0:
            continue
        total *= (size if isinstance(size, int) else compat.size_hint(size)) or 0
    return total
