"""msModelSlim's descriptors: a JSON file that names the type of every tensor, and safetensors files in the same folder.

Two variants: `quant_model_description_<type>.json` with `quant_model_weight_<type>.safetensors`, and
`quant_model_description.json` with `quant_model_weights*.safetensors`. Both may have shards with an index. Types:

W8A8           weight int8, input_scale and input_offset [1], deq_scale [N] = input_scale * weight_scale, and quant_bias [N]
               in int32 = bias / deq_scale - input_offset * the sum of the weight's row
W8A8_TIMESTEP  the same with a row for each step, and the tensors of W8A8_DYNAMIC
W8A8_DYNAMIC   weight int8, weight_scale and weight_offset [N, 1]
W8A16          the same for weights alone
WFP8AFP8_DYNAMIC   weight e4m3, weight_scale [N, 1]

The scales of float16 models are the bits of float32 numbers in int64. `X.div.mul_scale` [K] multiplies the input, and the tensors
of the layer are then those of `X.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritium.errors import CheckpointError, nearest
from tritium.techniques.quantize.files.layer import Checkpoint, QuantizedLayer
from tritium.techniques.quantize.files.tensors import INDEX, Tensors, read_json

_KIND = "model_quant_type"
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_INNER, _SMOOTH = ".linear", ".div.mul_scale"
FLOAT = "FLOAT"


def read(path: Path) -> Checkpoint:
    """Read a descriptor and the weights in its folder."""
    described = read_json(path)
    kind = described.get(_KIND)
    if not isinstance(kind, str) or not kind:
        raise CheckpointError(f"{path}: it has no {_KIND!r}, the type of the model")
    tensors = Tensors(_weights_of(path, kind))
    layers = {}
    for name, type_ in described.items():
        if not name.endswith(".weight") or type_ == FLOAT:
            continue
        if type_ not in _READERS:
            raise CheckpointError(f"{path}: {name!r} has the type {type_!r}; {nearest(str(type_), [*_READERS, FLOAT])}")
        inner = name.removesuffix(".weight")
        outer = inner.removesuffix(_INNER)
        smooth = tensors.take_if_there(outer + _SMOOTH, _FLOATING)
        found = _READERS[type_](tensors, inner)
        if smooth is not None and smooth.numel() != found.values.shape[1]:
            raise tensors.error(f"'{outer}{_SMOOTH}' has {smooth.numel()} numbers for {found.values.shape[1]} columns")
        fields = {} if smooth is None else {"smooth": smooth.to(torch.float32).reshape(-1)}
        layers[inner if smooth is None else outer] = QuantizedLayer(**{**found.__dict__, **fields})
    if not layers:
        raise CheckpointError(f"{path}: no weight is quantized")
    return Checkpoint(f"msModelSlim {kind}", layers, tensors.rest())


def _weights_of(path: Path, kind: str) -> Path:
    """Return the file of the weights, or the index of its shards."""
    names = [f"quant_model_weight_{kind.lower()}", "quant_model_weights"]
    found = [
        file for name in names for end in (INDEX, ".safetensors") if (file := path.with_name(name + end)).is_file()
    ]
    if not found:
        raise CheckpointError(f"{path}: beside it is neither {names[0]}.safetensors nor {names[1]}.safetensors")
    return found[0]


def _static(tensors: Tensors, layer: str) -> QuantizedLayer:
    """Return a layer with static scales. Its bias is what `quant_bias` adds, so that `bias` may be missing."""
    values = tensors.weight(f"{layer}.weight", torch.int8)
    rows = len(values)
    scale, offset, weight_scale, bias = _static_parts(tensors, layer, rows, values)
    if scale.numel() != 1:
        raise tensors.error(f"'{layer}.input_scale' has {scale.numel()} numbers, and W8A8 has one")
    return QuantizedLayer(
        values=values, scale=weight_scale, bias=bias, input="static", input_scale=scale, input_offset=offset
    )


def _static_parts(
    tensors: Tensors, layer: str, rows: int, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of the input [T], the scales of the weight [N, 1], and the bias [N]."""
    scale = tensors.take(f"{layer}.input_scale", _FLOATING).to(torch.float32).reshape(-1)
    offset = tensors.take(f"{layer}.input_offset", (*_FLOATING, torch.int8, torch.int32)).to(torch.float32).reshape(-1)
    steps = scale.numel()
    if offset.numel() != steps or not bool((scale > 0).all()):
        raise tensors.error(f"'{layer}.input_scale' and 'input_offset' are not positive scales with an offset each")
    sizes = [(rows,), (steps, rows)] if steps == 1 else [(steps, rows)]
    product = _bits(tensors.take(f"{layer}.deq_scale", (torch.float32, torch.int64), sizes)).reshape(steps, rows)
    added = tensors.take(f"{layer}.quant_bias", (torch.int32,), sizes).reshape(steps, rows)
    weight_scale = (product[0] / scale[0]).reshape(rows, 1)
    if not bool((weight_scale > 0).all()):
        raise tensors.error(f"'{layer}.deq_scale' has scales that are not positive numbers")
    # In float64: sums of a row times an offset have more digits than float32.
    sums = values.to(torch.float64).sum(1)
    bias = (added[0].to(torch.float64) + offset[0].to(torch.float64) * sums) * product[0].to(torch.float64)
    stored = tensors.bias(layer, rows)
    return scale, offset, weight_scale, stored if stored is not None else bias.to(torch.float32)


def _bits(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales, also from their bits in int64."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale


def _by_step(tensors: Tensors, layer: str) -> QuantizedLayer:
    values = tensors.weight(f"{layer}.weight", torch.int8)
    scale, offset, weight_scale, bias = _static_parts(tensors, layer, len(values), values)
    own = tensors.take_if_there(f"{layer}.weight_scale", _FLOATING, [(len(values),), (len(values), 1)])
    if own is not None:
        weight_scale = own.to(torch.float32).reshape(-1, 1)
    tensors.names.pop(f"{layer}.weight_offset", None)
    return QuantizedLayer(
        values=values, scale=weight_scale, bias=bias, input="step", input_scale=scale, input_offset=offset
    )


def _dynamic(tensors: Tensors, layer: str) -> QuantizedLayer:
    return _with_scales(tensors, layer, torch.int8, input="row")


def _weights(tensors: Tensors, layer: str) -> QuantizedLayer:
    return _with_scales(tensors, layer, torch.int8, input="none")


def _float8(tensors: Tensors, layer: str) -> QuantizedLayer:
    return _with_scales(tensors, layer, torch.float8_e4m3fn, input="row")


def _with_scales(tensors: Tensors, layer: str, dtype: torch.dtype, **fields: Any) -> QuantizedLayer:
    values = tensors.weight(f"{layer}.weight", dtype)
    rows = len(values)
    offset = tensors.take_if_there(f"{layer}.weight_offset", (*_FLOATING, torch.int8), [(rows,), (rows, 1)])
    has_offset = offset is not None and bool(offset.any())
    if has_offset and fields["input"] != "none":
        raise tensors.error(f"'{layer}.weight_offset' is not zero, and products need symmetric weights")
    return QuantizedLayer(
        values=values,
        scale=tensors.scale(f"{layer}.weight_scale", rows, whole=False),
        offset=offset.to(torch.float32).reshape(-1, 1) if offset is not None and has_offset else None,
        bias=tensors.bias(layer, rows),
        **fields,
    )


_READERS: dict[str, Callable[[Tensors, str], QuantizedLayer]] = {
    "W8A8": _static,
    "W8A8_DYNAMIC": _dynamic,
    "W8A8_TIMESTEP": _by_step,
    "W8A16": _weights,
    "WFP8AFP8_DYNAMIC": _float8,
}
