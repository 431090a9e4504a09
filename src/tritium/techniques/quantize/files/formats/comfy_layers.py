"""ComfyUI's newer format: a description of each layer, in the header or in a tensor `X.comfy_quant` of JSON bytes.

Formats: `float8_e4m3fn`, one scale a layer, and `int8_tensorwise`, one a row or a layer. With `convrot` the columns of int8
weights are rotated, in groups of `convrot_groupsize`, and inputs must be rotated too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tritium.ops.quantize_rows import ROTATIONS
from tritium.techniques.quantize.files.formats import FileFormat, Layers
from tritium.techniques.quantize.files.formats.rows import read_layer
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors

_HEADER, _TENSOR = "_quantization_metadata", ".comfy_quant"
_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "int8_tensorwise": torch.int8}


def recognises(tensors: Tensors) -> bool:
    return _HEADER in tensors.metadata or bool(tensors.layers_with(_TENSOR))


def read(tensors: Tensors) -> Layers:
    described: dict[str, Any] = {}
    if _HEADER in tensors.metadata:
        header = tensors.json(_HEADER, tensors.metadata[_HEADER])
        found = header.get("layers") if isinstance(header, dict) else None
        if not isinstance(found, dict):
            raise tensors.error(f"{_HEADER} has no 'layers'")
        described |= found
    for layer in tensors.layers_with(_TENSOR):
        text = bytes(tensors.take(layer + _TENSOR, (torch.uint8,)).tolist())
        described[layer] = tensors.json(layer + _TENSOR, text.decode("utf-8", "replace"))
    return {layer: _layer(tensors, layer, how) for layer, how in described.items()}


def _layer(tensors: Tensors, layer: str, how: Any) -> QuantizedLayer:
    name = how.get("format") if isinstance(how, dict) else how
    if not isinstance(how, dict) or name not in _FORMATS:
        raise tensors.error(f"{layer!r} has the format {name!r}; readable are {', '.join(_FORMATS)}")
    smooth = tensors.take_if_there(f"{layer}.pre_quant_scale", (torch.float32, torch.bfloat16, torch.float16))
    found = read_layer(tensors, layer)
    if found.values.dtype != _FORMATS[name]:
        raise tensors.error(f"'{layer}.weight' is {found.values.dtype}, and its format is {name}")
    if how.get("full_precision_matrix_mult"):
        found = dataclasses.replace(found, input="none", input_scale=None)
    if smooth is not None:
        if tuple(smooth.shape) != (found.values.shape[1],):
            raise tensors.error(f"'{layer}.pre_quant_scale' has shape {tuple(smooth.shape)}, not one number a column")
        found = dataclasses.replace(found, smooth=smooth.to(torch.float32))
    return _rotated(tensors, layer, found, how) if how.get("convrot") else found


def _rotated(tensors: Tensors, layer: str, found: QuantizedLayer, how: dict[str, Any]) -> QuantizedLayer:
    """Return the layer with values in the order of Tritium's matrix: theirs is its mirror image in each group."""
    group, columns = how.get("convrot_groupsize", 256), found.values.shape[1]
    if group not in ROTATIONS[1:] or columns % group:
        raise tensors.error(
            f"{layer!r} is rotated in groups of {group!r} columns, of {columns}; groups are 4, 16, 64, 256"
        )
    values = found.values.unflatten(1, (-1, group)).flip(2).flatten(1)
    return dataclasses.replace(found, values=values, rotate=group)


FORMAT = FileFormat("ComfyUI comfy_quant", recognises, read)
