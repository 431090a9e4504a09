"""Count floating-point operations of contractions (products, convolutions, attention) from shapes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat.operators import FLASH_ATTENTION, OpOverload, operator_of

# References of owned ops by qualified name, such as `tritium::rms_norm`. Ops add theirs when they are registered.
REFERENCES: dict[str, Callable[..., Any]] = {}


def flops_of(node: fx.Node) -> int | None:
    """Return the operation count of a traced node; None without a contraction or with unknown shapes."""
    overload = operator_of(node)
    if overload is None:
        return None
    reference = REFERENCES.get(overload.name().partition(".")[0])
    try:
        return _flops_of_reference(node, reference) if reference is not None else _flops_by_formula(node, overload)
    except Exception:  # noqa: BLE001 - formulas and references may reject these arguments; the report then uses bytes
        return None


def _counter() -> Any:
    # `flop_counter` imports Triton, so it is imported only when needed.
    return importlib.import_module("torch.utils.flop_counter")


def _flops_by_formula(node: fx.Node, overload: OpOverload) -> int | None:
    formulas = _counter().flop_registry
    formula = formulas.get(overload.overloadpacket)
    if formula is None and overload.overloadpacket.__name__.startswith("_scaled_dot_product"):
        # Device-specific variants of attention have separate names.
        formula = formulas[FLASH_ATTENTION]
    if formula is None:
        return None
    shapes = fx.map_arg(node.args, lambda source: _shape(source.meta["val"]))
    # torch's formulas accept shapes in place of tensors.
    return int(formula(*shapes, out_val=_shape(node.meta["val"])))


def flops_of_call(overload: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Return the operation count of a call of a contraction; 0 if there is no formula for it."""
    if overload.overloadpacket.__name__ == "grouped_linear":
        # Each row is multiplied with one of the weights.
        return int(2 * args[0].shape[0] * args[1][0].numel())
    formulas = _counter().flop_registry
    formula = formulas.get(overload.overloadpacket)
    if formula is None and overload.overloadpacket.__name__.startswith("_scaled_dot_product"):
        formula = formulas[FLASH_ATTENTION]
    # Formulas take the arguments of one variant of attention; others have more.
    if formula is formulas[FLASH_ATTENTION]:
        args, kwargs = args[:3], {}
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _flops_of_reference(node: fx.Node, reference: Callable[..., Any]) -> int | None:
    """Count the contractions of an op's reference by running it on meta tensors."""

    def empty(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(_shape(value), dtype=value.dtype, device="meta")

    with _counter().FlopCounterMode(display=False) as counter:
        reference(*fx.map_arg(node.args, empty))
    return counter.get_total_flops() or None


def _shape(value: Any) -> tuple[int, ...]:
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(map(compat.dynamo.known_size, first.shape))


def bytes_of(values: Any) -> int:
    """Return the bytes of tensors of a node's value, with hints for dynamic sizes; unknown ones count as 0."""
    if isinstance(values, (tuple, list)):
        return sum(map(bytes_of, values))
    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        return 0
    total = values.dtype.itemsize
    for size, stride in zip(values.shape, values.stride(), strict=True):
        # An expanded dim is read once.
        if isinstance(stride, int) and stride == 0:
            continue
        total *= (size if isinstance(size, int) else compat.dynamo.size_hint(size)) or 0
    return total
