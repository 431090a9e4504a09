"""BFL's fp8r and ModelOpt's FP8: `X.weight` in 8 bits and `X.weight_scale`, one a row or one a layer.

fp8r: weight e4m3 [N, K], weight_scale float32 [N]; inputs have a scale for each row. ModelOpt: weight_scale is one number, and
`X.input_scale` is the scale of the input. LightX2V writes the same with int8 weights or scales [N, 1].
"""

from __future__ import annotations

import torch

from tritium.techniques.quantize.files.formats import FileFormat, Layers
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors


def recognises(tensors: Tensors) -> bool:
    return bool(tensors.layers_with(".weight_scale"))


def read(tensors: Tensors) -> Layers:
    return {layer: read_layer(tensors, layer) for layer in tensors.layers_with(".weight_scale")}


def read_layer(tensors: Tensors, layer: str, **fields: object) -> QuantizedLayer:
    if f"{layer}.weight_scale_2" in tensors.names:
        raise tensors.error(
            f"{layer!r} is in 4 bits (NVFP4): its products exist on Blackwell GPUs, and are not read here"
        )
    values = tensors.weight(f"{layer}.weight", torch.float8_e4m3fn, torch.int8)
    scale = tensors.scale(f"{layer}.weight_scale", len(values), whole=True)
    static = tensors.take_if_there(f"{layer}.input_scale", (torch.float32,), [(), (1,)])
    if static is not None and not bool((static > 0).all()):
        raise tensors.error(f"'{layer}.input_scale' is not positive")
    given = {"input": "row" if static is None else "static", **fields}
    return QuantizedLayer(
        values=values,
        scale=scale,
        bias=tensors.bias(layer, len(values)),
        input_scale=None if static is None else static.reshape(1),
        **given,  # type: ignore[arg-type]  # fields of the layer
    )


FORMAT = FileFormat("BFL fp8r or ModelOpt FP8", recognises, read, order=2)
