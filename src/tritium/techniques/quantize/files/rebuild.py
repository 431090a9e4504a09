"""Describe quantized linears as JSON, and rebuild them in another process around tensors that it maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tritium.sharing.skeleton import Kind
from tritium.sharing.weights import DTYPES
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.linear import QuantizedLinear

_TENSORS = ("values", "scale", "offset", "bias", "input_scale", "input_offset", "smooth")


def _describe(linear: QuantizedLinear) -> dict[str, Any]:
    stored = linear.stored
    tensors = {name: value for name in _TENSORS if (value := getattr(stored, name)) is not None}
    return {
        "tensors": {name: [list(value.shape), _name(value.dtype)] for name, value in tensors.items()},
        "input": stored.input,
        "rotate": stored.rotate,
        "dtype": _name(linear.compute_dtype),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rebuild(_plain: nn.Module, state: dict[str, Any]) -> QuantizedLinear:
    """Return a linear without memory; its buffers are assigned later."""
    tensors: dict[str, Any] = {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for name, (shape, dtype) in state["tensors"].items()
    }
    layer = QuantizedLayer(**tensors, input=state["input"], rotate=int(state["rotate"]))
    return QuantizedLinear(layer, DTYPES[state["dtype"]])


QUANTIZED_LINEAR = Kind(QuantizedLinear, _describe, _rebuild, QuantizedLinear.settle)
