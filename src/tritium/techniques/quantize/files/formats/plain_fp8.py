"""Weights that were cast to float8 without a scale."""

from __future__ import annotations

import torch

from tritium.techniques.quantize.files.formats import FileFormat, Layers
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors


def recognises(tensors: Tensors) -> bool:
    has_scales = any("scale" in name.rpartition(".")[2] for name in tensors.names if "scale_shift" not in name)
    return not has_scales and any(tensors.dtype(name) == "F8_E4M3" for name in tensors.names)


def read(tensors: Tensors) -> Layers:
    layers: Layers = {}
    for name in list(tensors.names):
        if tensors.dtype(name) != "F8_E4M3":
            continue
        values = tensors.take(name)
        layer = name.removesuffix(".weight")
        if values.dim() != 2 or layer == name:
            # Files of this kind cast norms and biases too.
            tensors.names[name] = _Cast(values.to(torch.bfloat16))
            continue
        scale = torch.ones(len(values), 1)
        layers[layer] = QuantizedLayer(values=values, scale=scale, bias=_bias(tensors, layer), input="none")
    return layers


def _bias(tensors: Tensors, layer: str) -> torch.Tensor | None:
    bias = tensors.take_if_there(f"{layer}.bias")
    return bias if bias is None or bias.dtype != torch.float8_e4m3fn else bias.to(torch.bfloat16)


class _Cast:
    """A tensor in the place of an opened file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, _name: str) -> torch.Tensor:
        return self._tensor

    def get_slice(self, _name: str) -> _Cast:
        return self

    def get_dtype(self) -> str:
        return "BF16"


FORMAT = FileFormat("plain float8", recognises, read, order=3)
