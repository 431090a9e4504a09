"""Rules by which Inductor lowers Tritium's operators; `lower(overload, rule)` installs one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

# The order of strides in channels-last images and videos, by number of dims.
_CHANNELS_LAST = {4: [3, 0, 2, 1], 5: [4, 0, 3, 2, 1]}


def _inductor(module: str) -> Any:
    return importlib.import_module(f"torch._inductor.{module}")


def lower(overload: Any, rule: Callable[..., Any]) -> None:
    """Let Inductor lower an operator by a rule, unless it has one."""
    lowering = _inductor("lowering")
    if overload not in lowering.lowerings:
        lowering.register_lowering(overload, type_promotion_kind=None)(rule)


def stored(x: Any, order: Sequence[int]) -> Any:
    """Compute (x, order of strides) as x in memory, written once for all readers.

    Without it, every Triton kernel that reads an expression gets a separate buffer.
    """
    x.realize()
    return _inductor("ir").ExternKernel.require_stride_order(x, order)


def channels_last(x: Any) -> Any:
    """Compute one image or video as a channels-last copy of it."""
    return _inductor("ir").ExternKernel.require_stride_order(x, _CHANNELS_LAST[len(x.get_size())])


def product_in_place(total: Any, left: Any, right: Any) -> Any:
    """Compute (sum, left, right) as `sum.addmm_(left, right)` if no other operator reads the sum.

    Inductor's `addmm` writes to new memory, into which cuBLAS copies the sum first.
    """
    ir = _inductor("ir")
    source = _inductor("virtualized").V.graph.current_node.args[0]
    # Another operator wrote the sum to memory, and only this one reads it.
    owned = len(source.users) == 1 and source.op == "call_function"
    if not owned or not ir.is_storage_and_layout(total):
        return _inductor("lowering").lowerings[torch.ops.aten.addmm.default](total, left, right)
    ir.FallbackKernel.create(torch.ops.aten.addmm_.default, total, left, right)
    return total
