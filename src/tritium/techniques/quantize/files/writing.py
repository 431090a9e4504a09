"""Write the denoiser of a pipeline's folder in torchao's layout, which diffusers loads; no model is built on a device."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritium.errors import ConfigError, MissingExtra, brief
from tritium.ops.quantize_rows import FP8, INT8, quantize_weight
from tritium.techniques.quantize.config import Quantize
from tritium.techniques.quantize.files.formats import torchao
from tritium.techniques.quantize.files.layer import QuantizedLayer
from tritium.techniques.quantize.files.tensors import INDEX, Tensors, read_json
from tritium.techniques.quantize.selection import select

# The formats that torchao's layout has, and the dtype of the weights.
FORMATS = {"fp8": FP8, "int8": INT8, "int8-weights": INT8}

# Components that are quantized; Wan has two.
DENOISERS = ("transformer", "transformer_2", "unet")

_NAME = "diffusion_pytorch_model"

# Bytes of a shard, as diffusers writes them.
SHARD = 5 * 10**9


@dataclass(frozen=True)
class Written:
    """What was written for one component."""

    component: str
    layers: int
    kept: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        sizes = f"{self.bytes_before / 1e9:.3g} GB before, {self.bytes_after / 1e9:.3g} GB after"
        return f"{self.component}: {self.layers} linears quantized, {self.kept} unchanged; {sizes}"


def write_pipeline(source: Path, target: Path, config: Quantize) -> list[Written]:
    """Copy a pipeline's folder, with the denoiser quantized; the target appears when it is complete."""
    if config.linear not in FORMATS or config.formats != {config.linear}:
        raise ConfigError(
            f"torchao's layout has {', '.join(FORMATS)}, not {', '.join(sorted(map(str, config.formats)))}"
        )
    components = [name for name in DENOISERS if (source / name / "config.json").is_file()]
    if not components:
        raise ConfigError(f"{source} has no {', '.join(DENOISERS)} to quantize")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new folder")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name not in components:
                (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, part / entry.name)
        written = [_write_model(source / name, part / name, config) for name in components]
        part.rename(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {brief(error)}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return written


def _write_model(source: Path, target: Path, config: Quantize) -> Written:
    settings = read_json(source / "config.json")
    if "quantization_config" in settings:
        raise ConfigError(f"{source} is quantized already, by {settings['quantization_config'].get('quant_method')}")
    selection = select(_skeleton(settings), config)
    tensors = Tensors(source)
    layers, dtype, before = {}, torch.bfloat16, 0
    for name in selection.chosen:
        weight = tensors.weight(f"{name}.weight", torch.float32, torch.bfloat16, torch.float16)
        layers[name] = quantized(weight, str(config.linear), tensors.bias(name, len(weight)))
        dtype, before = weight.dtype, before + weight.numel() * weight.element_size()
    rest = tensors.rest()
    before += sum(tensor.numel() * tensor.element_size() for tensor in rest.values())
    parts, header = torchao.flattened(layers, rest, dtype)
    target.mkdir()
    _save(parts, {"format": "pt", **header}, target)
    settings["quantization_config"] = torchao.config_of(str(config.linear))
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    after = sum(tensor.numel() * tensor.element_size() for tensor in parts.values())
    return Written(source.name, len(layers), len(selection.modules) - len(layers), before, after)


def quantized(weight: torch.Tensor, format_: str, bias: torch.Tensor | None = None) -> QuantizedLayer:
    """Return a linear's weight in a format, with scales for each row."""
    values, scale = quantize_weight(weight, FORMATS[format_])
    return QuantizedLayer(values=values, scale=scale, bias=bias, input="none" if format_ == "int8-weights" else "row")


def _skeleton(settings: Mapping[str, Any]) -> nn.Module:
    """Build a model without weights, to select its layers."""
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers", "quantizing a pipeline's folder") from error
    kind = getattr(diffusers, str(settings.get("_class_name")), None)
    if kind is None:
        raise ConfigError(f"diffusers has no model class {settings.get('_class_name')!r}")
    with torch.device("meta"):
        model: nn.Module = kind.from_config(dict(settings))
    return model


def _save(parts: Mapping[str, torch.Tensor], header: dict[str, str], folder: Path) -> None:
    """Write shards, each with the whole header: diffusers keeps the header of the last one."""
    save_file = importlib.import_module("safetensors.torch").save_file
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in parts.items():
        length = tensor.numel() * tensor.element_size()
        if size + length > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += length
    if len(shards) == 1:
        save_file(shards[0], folder / f"{_NAME}.safetensors", header)
        return
    names = [f"{_NAME}-{place:05}-of-{len(shards):05}.safetensors" for place in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, header)
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.numel() * tensor.element_size() for tensor in parts.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{_NAME}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
