"""torchao's layout in safetensors: `X._weight_qdata`, `X._weight_scale`, and a description of each weight in the header.

The header has `tensor_names`, a JSON list, and for each name a JSON text with the class of the tensor, its attributes and the
names of its parts. Reading and writing need no torchao.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tritium.techniques.quantize.files.formats import FileFormat, Layers
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors

_NAMES, _WEIGHT, _PARTS = "tensor_names", ".weight", "._weight_"
_CLASSES = {"Float8Tensor": torch.float8_e4m3fn, "Int8Tensor": torch.int8}

_E4M3 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
_ROW = {"_type": "PerRow", "_data": {"dim": -1}}
_AUTO = {"_type": "KernelPreference", "_data": "AUTO"}
_MM = {"_type": "Float8MMConfig", "_data": {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}}
_SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}


def recognises(tensors: Tensors) -> bool:
    return _NAMES in tensors.metadata and bool(tensors.layers_with(f"{_PARTS}qdata"))


def read(tensors: Tensors) -> Layers:
    names = tensors.json(_NAMES, tensors.metadata[_NAMES])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise tensors.error(f"{_NAMES} is no list of names")
    layers: Layers = {}
    for name in names:
        how = tensors.json(name, tensors.metadata.get(name, "null"))
        kind = how.get("_type") if isinstance(how, dict) else None
        if kind == "Tensor":
            continue
        if kind not in _CLASSES or not name.endswith(_WEIGHT) or not isinstance(how.get("_data"), dict):
            raise tensors.error(f"{name!r} is a {kind}; readable are weights of {', '.join(_CLASSES)}")
        layer = name.removesuffix(_WEIGHT)
        layers[layer] = _layer(tensors, layer, _CLASSES[kind], how["_data"])
    return layers


def _layer(tensors: Tensors, layer: str, dtype: torch.dtype, data: dict[str, Any]) -> QuantizedLayer:
    part = layer + _PARTS
    values = tensors.weight(f"{part}qdata", dtype)
    block = data.get("block_size")
    if block not in ([1, values.shape[1]], list(values.shape)):
        raise tensors.error(
            f"'{layer}.weight' has a scale for each block of {block}; readable are rows and whole weights"
        )
    scale = tensors.scale(f"{part}scale", len(values), whole=True)
    zero = tensors.take_if_there(f"{part}zero_point")
    smooth = tensors.take_if_there(f"{part}act_pre_scale")
    static = tensors.take_if_there(f"{part}act_quant_scale", (torch.float32,))
    if static is not None and static.numel() != 1:
        raise tensors.error(
            f"'{layer}.weight' has static scales of shape {tuple(static.shape)}; readable is one number"
        )
    dynamic = data.get("act_quant_kwargs") is not None
    return QuantizedLayer(
        values=values,
        scale=scale,
        offset=zero.to(torch.float32).reshape(-1, 1) if zero is not None and bool(zero.any()) else None,
        bias=tensors.bias(layer, len(values)),
        input="static" if static is not None else "row" if dynamic else "none",
        input_scale=None if static is None else static.reshape(1),
        # torchao multiplies the input by it.
        smooth=None if smooth is None else smooth.to(torch.float32).reshape(-1),
    )


def flattened(
    layers: Mapping[str, QuantizedLayer], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file, and its header; `dtype` is that of the model's inputs."""
    parts: dict[str, torch.Tensor] = dict(tensors)
    header = {name: json.dumps({"_type": "Tensor"}) for name in tensors}
    for layer, found in layers.items():
        parts[f"{layer}{_PARTS}qdata"], parts[f"{layer}{_PARTS}scale"] = found.values, found.scale
        names = ["qdata", "scale"]
        if found.values.dtype == torch.int8:
            parts[f"{layer}{_PARTS}zero_point"] = torch.zeros(found.scale.shape, dtype=torch.int8)
            names.insert(0, "zero_point")
        header[layer + _WEIGHT] = json.dumps(
            {"_type": _class_of(found), "_data": _attributes(found, dtype), "_tensor_data_names": names}
        )
        if found.bias is not None:
            parts[f"{layer}.bias"] = found.bias
            header[f"{layer}.bias"] = json.dumps({"_type": "Tensor"})
    return parts, {**header, _NAMES: json.dumps(list(header))}


def _class_of(layer: QuantizedLayer) -> str:
    return next(name for name, dtype in _CLASSES.items() if dtype == layer.values.dtype)


def _attributes(layer: QuantizedLayer, dtype: torch.dtype) -> dict[str, Any]:
    shared: dict[str, Any] = {"block_size": [1, layer.values.shape[1]]}
    shared["dtype"] = {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
    is_product = layer.input == "row"
    if layer.values.dtype == torch.int8:
        rows = {"granularity": _ROW, "mapping_type": _SYMMETRIC, "reduce_range": False}
        inputs = {"_type": "QuantizeTensorToInt8Kwargs", "_data": rows} if is_product else None
        return {"act_quant_kwargs": inputs, "reduce_range": False, **shared}
    bounds = {"mm_config": None, "hp_value_lb": None, "hp_value_ub": None, "kernel_preference": _AUTO}
    fields = {"float8_dtype": _E4M3, "granularity": _ROW, **bounds}
    inputs = {"_type": "QuantizeTensorToFloat8Kwargs", "_data": fields} if is_product else None
    return {"mm_config": _MM if is_product else None, "act_quant_kwargs": inputs, "kernel_preference": _AUTO, **shared}


def config_of(format_: str) -> dict[str, Any]:
    """Return the `quantization_config` of a model's config.json for a format."""
    row = {**_ROW, "_version": 1}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "fp8": (
            "Float8DynamicActivationFloat8WeightConfig",
            {
                "activation_dtype": _E4M3,
                "weight_dtype": _E4M3,
                "granularity": [row, row],
                "packing_format": {"_type": "Float8PackingFormat", "_data": "PLAIN"},
                "mm_config": {**_MM, "_version": 1},
                "activation_value_lb": None,
                "activation_value_ub": None,
                "kernel_preference": _AUTO,
                "set_inductor_config": False,
            },
        ),
        "int8": (
            "Int8DynamicActivationInt8WeightConfig",
            {"act_mapping_type": _SYMMETRIC, "granularity": row, "set_inductor_config": False},
        ),
        "int8-weights": ("Int8WeightOnlyConfig", {"granularity": row, "set_inductor_config": False}),
    }
    name, data = configs[format_]
    quant_type = {"default": {"_type": name, "_version": 2, "_data": data}}
    return {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": None}


FORMAT = FileFormat("torchao", recognises, read)
