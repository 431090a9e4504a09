"""ComfyUI's older scaled float8: a tensor `scaled_fp8`, and `X.scale_weight`, `X.scale_input` for each `X.weight`.

The dtype of `scaled_fp8` is that of the weights. With two elements the file asks for products in full precision, and a
`scale_input` of 1 stands for none.
"""

from __future__ import annotations

import torch

from tritium.techniques.quantize.files.formats import FileFormat, Layers
from tritium.techniques.quantize.files.layer import Input, QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors

_MARK, _SCALE, _INPUT = "scaled_fp8", ".scale_weight", ".scale_input"


def recognises(tensors: Tensors) -> bool:
    return any(name.rpartition(".")[2] == _MARK for name in tensors.names)


def read(tensors: Tensors) -> Layers:
    marks = [name for name in tensors.names if name.rpartition(".")[2] == _MARK]
    layers: Layers = {}
    for mark in marks:
        kind = tensors.take(mark)
        if kind.dtype != torch.float8_e4m3fn:
            raise tensors.error(f"{mark!r} says {kind.dtype}; only float8_e4m3fn can be multiplied here")
        prefix = mark.removesuffix(_MARK)
        for layer in tensors.layers_with(_SCALE):
            if layer.startswith(prefix):
                layers[layer] = _layer(tensors, layer, full_precision=kind.numel() == 2)
    return layers


def _layer(tensors: Tensors, layer: str, *, full_precision: bool) -> QuantizedLayer:
    values = tensors.weight(f"{layer}.weight", torch.float8_e4m3fn)
    scale = tensors.scale(layer + _SCALE, len(values), whole=True)
    static = tensors.take_if_there(layer + _INPUT, (torch.float32,), [(), (1,)])
    how: Input = "none" if full_precision else "row" if static is None or float(static) == 1 else "static"
    return QuantizedLayer(
        values=values,
        scale=scale,
        bias=tensors.bias(layer, len(values)),
        input=how,
        input_scale=static.reshape(1) if static is not None and how == "static" else None,
    )


FORMAT = FileFormat("ComfyUI scaled_fp8", recognises, read, order=1)
