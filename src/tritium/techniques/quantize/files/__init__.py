"""Quantized checkpoints of others: read them into a model, write torchao's layout, quantize while a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritium.errors import CheckpointError, ConfigError, nearest
from tritium.layers.steps import TimestepPolicyConfig
from tritium.sharing.lease import unshare
from tritium.techniques.quantize.files import descriptor, formats
from tritium.techniques.quantize.files.layer import Checkpoint, QuantizedLayer
from tritium.techniques.quantize.files.linear import QuantizedLinear

__all__ = [
    "Checkpoint",
    "QuantizedLayer",
    "QuantizedLinear",
    "quantize",
    "read",
]

# Prefixes of names in files that hold a model as a part of something else.
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.")


def read(path: str | Path) -> Checkpoint:
    """Read a quantized checkpoint: a safetensors file, an index, a folder, or a descriptor of msModelSlim."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"there is no quantized checkpoint {path}")
    is_descriptor = path.suffix == ".json" and not path.name.endswith(".safetensors.index.json")
    return descriptor.read(path) if is_descriptor else formats.read(path)


def quantize(
    model: nn.Module,
    path: str | Path,
    *,
    timestep_config: TimestepPolicyConfig | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Load a quantized checkpoint into a model, in place: its linears are replaced by quantized ones. Return the model.

    Args:
        model: The model, with the names of the file.
        path: A safetensors file, an index, a folder with one of them, or msModelSlim's `quant_model_description*.json`.
        timestep_config: The steps with static scales, for files that have scales by step.
        dtype: The dtype of the layers' biases and results; that of each replaced weight if left out.

    A file that cannot be read, or does not fit the model, raises a `CheckpointError`, and nothing is changed.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"quantize takes an nn.Module, got {type(model).__name__}; of a pipeline, pass its transformer"
        )
    if timestep_config is not None and not isinstance(timestep_config, TimestepPolicyConfig):
        raise ConfigError(f"timestep_config takes a TimestepPolicyConfig, got {type(timestep_config).__name__}")
    found = _renamed(read(path), model)
    if timestep_config is not None and not any(layer.input == "step" for layer in found.layers.values()):
        raise ConfigError(f"timestep_config is for files with scales by step, and {path} has none; leave it out")
    _check_fits(found, model, path)
    # Created first: what fails here has changed nothing.
    created = {
        name: _created(model.get_submodule(name), layer, dtype, timestep_config) for name, layer in found.layers.items()
    }
    if found.tensors:
        unshare(model)
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in found.tensors.items():
            own[name].copy_(tensor)
    for name, linear in created.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
    return model


def _created(
    linear: Any, layer: QuantizedLayer, dtype: torch.dtype | None, policy: TimestepPolicyConfig | None
) -> QuantizedLinear:
    made = QuantizedLinear(layer, dtype or linear.weight.dtype, policy)
    if layer.bias is None and linear.bias is not None:
        made.bias = linear.bias
    # A model on the meta device has no weights yet: the file's are on the CPU.
    return made if linear.weight.is_meta else made.to(linear.weight.device)


def _renamed(found: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return a checkpoint without a prefix that all of its layers have, and the model's modules have not."""
    names = dict(model.named_modules())
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) and name.removeprefix(prefix) in names for name in found.layers):
            layers = {name.removeprefix(prefix): layer for name, layer in found.layers.items()}
            # Files of whole pipelines hold other models too.
            tensors = {
                name.removeprefix(prefix): value for name, value in found.tensors.items() if name.startswith(prefix)
            }
            return Checkpoint(found.format, layers, tensors)
    return found


def _check_fits(found: Checkpoint, model: nn.Module, path: str | Path) -> None:
    modules = dict(model.named_modules())
    for name, layer in found.layers.items():
        linear = modules.get(name)
        if linear is None:
            kind = type(model).__name__
            raise CheckpointError(f"{path}: {kind} has no layer {name!r}; {nearest(name, filter(None, modules))}")
        if type(linear) is not nn.Linear:
            raise CheckpointError(f"{path}: {name!r} is a {type(linear).__name__} in the model, not an nn.Linear")
        if linear.weight.shape != layer.values.shape:
            shapes = tuple(layer.values.shape), tuple(linear.weight.shape)
            raise CheckpointError(
                f"{path}: {name!r} has a weight of shape {shapes[0]}, and the model's has {shapes[1]}"
            )
        if layer.bias is not None and linear.bias is None:
            raise CheckpointError(f"{path}: {name!r} has a bias, and the model's linear has none")
    own = model.state_dict()
    for name, tensor in found.tensors.items():
        if name not in own:
            raise CheckpointError(f"{path}: the model has no tensor {name!r}; {nearest(name, own)}")
        if own[name].shape != tensor.shape:
            shapes = tuple(tensor.shape), tuple(own[name].shape)
            raise CheckpointError(f"{path}: {name!r} has shape {shapes[0]}, and the model's has {shapes[1]}")
