"""Quantized files in a few lines of numpy, and what their weights are."""

import json

import numpy as np

N, K, STEPS = 6, 8, 4

# The numbers of float8_e4m3fn, by their bytes: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa.
_BYTES = np.arange(256)
_EXPONENT, _MANTISSA = _BYTES >> 3 & 15, _BYTES & 7
_MAGNITUDE = np.where(_EXPONENT == 0, _MANTISSA / 8 * 2.0**-6, (1 + _MANTISSA / 8) * 2.0 ** (_EXPONENT - 7.0))
E4M3 = np.where(_BYTES < 128, _MAGNITUDE, -_MAGNITUDE)

_NAMES = {"float32": "F32", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16"}


def save(path, tensors, metadata=None):
    """Write a safetensors file. A value is an array, or a pair of the name of a dtype and an array of bytes."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, value in tensors.items():
        kind, array = value if isinstance(value, tuple) else (_NAMES[value.dtype.name], value)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def int8(rows=N, columns=K, seed=0):
    return np.random.default_rng(seed).integers(-127, 128, (rows, columns)).astype(np.int8)


def float8(rows=N, columns=K, seed=0):
    """Return bytes of float8 as a tensor of a file, and their numbers; 127 and 255 are NaN."""
    found = np.random.default_rng(seed).integers(0, 127, (rows, columns)) + 128 * (int8(rows, columns, seed) < 0)
    return ("F8_E4M3", found.astype(np.uint8)), E4M3[found].astype(np.float32)


def scales(*shape, seed=1):
    return np.random.default_rng(seed).uniform(0.01, 0.1, shape).astype(np.float32)


def text(value):
    """Return JSON as a tensor of bytes."""
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def static(layer="a", steps=None, largest=None):
    """A layer with static scales: its bias is in `quant_bias`, rounded to whole products."""
    lead = () if steps is None else (steps,)
    scale, offset = scales(*lead or (1,), seed=3), np.float32(random(*lead or (1,)).round() * 5)
    if largest is not None:
        # Inputs up to this size fit into 8 bits, with an offset of up to 20.
        scale = np.float32(largest / 107 * (1 + 0.1 * random(*scale.shape) ** 2))
    weight_scale, values, bias = scales(N, seed=4), int8(), random(N)
    product = (scale[..., None] * weight_scale).reshape(*lead, N)
    added = np.round(bias / product - (offset[..., None] * values.sum(1)).reshape(*lead, N)).astype(np.int32)
    parts = {"weight": values, "input_scale": scale, "input_offset": offset, "deq_scale": product, "quant_bias": added}
    return {f"{layer}.{name}": value for name, value in parts.items()}, values * weight_scale[:, None], bias


def dynamic(layer="a"):
    parts = {"weight": int8(), "weight_scale": scales(N, 1), "weight_offset": np.zeros((N, 1), np.float32)}
    return {f"{layer}.{name}": value for name, value in parts.items()}, int8() * scales(N, 1)


def write(folder, kind, tensors, types=None, *, ascend=False):
    """Write the descriptor and its weights in one of the two variants; return the path of the descriptor."""
    suffix = "" if ascend else f"_{kind.lower()}"
    save(folder / f"quant_model_weight{'s' if ascend else suffix}.safetensors", tensors)
    described = {"model_quant_type": kind, **dict.fromkeys(tensors, kind), **(types or {})}
    path = folder / f"quant_model_description{suffix}.json"
    path.write_text(json.dumps(described))
    return path
