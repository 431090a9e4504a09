"""A bank of LoRAs: their weights are copied into one set of padded LoRA layers, so that switching compiles nothing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritium.errors import ConfigError, MissingExtra, brief
from tritium.pipelines.parts import modules_of
from tritium.serve.engine import Lora

_ADAPTER = "tritium"

# Component and path of a module.
Place = tuple[str, str]


class TooLarge(ValueError):
    """LoRAs of one request have more ranks than the bank's layers."""


@dataclass(frozen=True)
class _Factors:
    """The two factors of an adapter's change of one layer; the second contains the adapter's own scale."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class LoraBank:
    """LoRAs by name. The pipeline has LoRA layers wherever one of them has, all of one rank, and filled with zeros.

    Without LoRAs these layers are disabled, so that such requests run as fast as without a bank.
    """

    def __init__(self, pipe: Any, files: Mapping[str, str], rank: int | None = None) -> None:
        _require_peft()
        self._adapters = {name: _read(pipe, name, Path(file)) for name, file in files.items()}
        largest = max(factors.rank for adapter in self._adapters.values() for factors in adapter.values())
        if rank is not None and rank < largest:
            raise ConfigError(f"a LoRA rank of {rank} is below {largest}, the largest of the files; leave it out")
        self.rank = rank or largest
        self._layers = _add_layers(pipe, {place for adapter in self._adapters.values() for place in adapter}, self.rank)
        self._active: tuple[Lora, ...] | None = None
        self.use(())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def use(self, loras: Sequence[Lora]) -> None:
        """Run the pipeline with these LoRAs from now on; raise `TooLarge` if their ranks do not fit, and change nothing."""
        loras = tuple(loras)
        if loras == self._active:
            return
        needed = {place: self._factors(loras, place) for place in self._layers} if loras else {}
        for place, found in needed.items():
            if sum(factors.rank for factors, _ in found) > self.rank:
                names = " and ".join(lora.name for lora in loras)
                ranks = " + ".join(str(factors.rank) for factors, _ in found)
                raise TooLarge(
                    f"the LoRAs {names} have ranks {ranks} at {place[1]}, and this server's layers have {self.rank}; "
                    "use fewer of them, or start it with a larger --lora-rank"
                )
        with torch.no_grad():
            for place, found in needed.items():
                _fill(self._layers[place], found)
            for layer in self._layers.values():
                layer.enable_adapters(bool(loras))
                # Enabling asks for gradients, which compiled code is guarded against.
                layer.requires_grad_(requires_grad=False)
        self._active = loras

    def _factors(self, loras: Sequence[Lora], place: Place) -> list[tuple[_Factors, float]]:
        found = ((self._adapters[lora.name].get(place), lora.scale) for lora in loras)
        return [(factors, scale) for factors, scale in found if factors is not None]


def _fill(layer: Any, found: Sequence[tuple[_Factors, float]]) -> None:
    """Write factors side by side into a LoRA layer, and zeros behind them."""
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    # Zeros in one factor are enough, and old values of the other are finite.
    up.zero_()
    start = 0
    for factors, scale in found:
        end = start + factors.rank
        down[start:end].copy_(factors.down)
        up[:, start:end].copy_(factors.up * scale)
        start = end


def _read(pipe: Any, name: str, file: Path) -> dict[Place, _Factors]:
    """Load a LoRA file with diffusers, which knows the formats, and take its factors out again."""
    if not file.is_file():
        raise ConfigError(f"LoRA {name!r}: there is no file {file}")
    try:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=_ADAPTER, local_files_only=True)
        factors = {place: _factors_of(name, place, layer) for place, layer in _lora_layers(pipe)}
        pipe.unload_lora_weights()
    except ConfigError:
        raise
    except Exception as error:
        # Loaders of diffusers fail in many ways on files that they do not understand.
        raise ConfigError(f"LoRA {name!r}: {file} does not fit {type(pipe).__name__}: {brief(error)}") from error
    if not factors:
        raise ConfigError(f"LoRA {name!r}: {file} changes no layer of {type(pipe).__name__}")
    return factors


def _factors_of(name: str, place: Place, layer: Any) -> _Factors:
    parts = dict(layer.named_parameters(recurse=True))
    extra = [key for key in parts if "magnitude" in key or (key.startswith("lora_B") and key.endswith("bias"))]
    if extra:
        raise ConfigError(
            f"LoRA {name!r} has {extra[0]} at {place[1]}; a bank takes plain LoRAs, without DoRA or biases"
        )
    down, up = (factors[_ADAPTER].weight.detach().cpu().clone() for factors in (layer.lora_A, layer.lora_B))
    return _Factors(down, up * layer.scaling[_ADAPTER])


def _lora_layers(pipe: Any) -> Iterator[tuple[Place, Any]]:
    layer_class: Any = importlib.import_module("peft.tuners.lora").LoraLayer
    for component, module in modules_of(pipe).items():
        for path, layer in module.named_modules():
            if isinstance(layer, layer_class):
                yield (component, path), layer


def _add_layers(pipe: Any, places: set[Place], rank: int) -> dict[Place, Any]:
    """Add a LoRA layer of one rank at each place; return the layers."""
    config: Any = importlib.import_module("peft").LoraConfig
    for component in {name for name, _ in places}:
        module = pipe.components[component]
        paths = "|".join(re.escape(path) for name, path in sorted(places) if name == component)
        # PEFT compares a string with whole names, and entries of a list with their ends.
        module.add_adapter(config(r=rank, lora_alpha=rank, target_modules=f"^(?:{paths})$"), adapter_name=_ADAPTER)
        module.eval().requires_grad_(requires_grad=False)
    return dict(_lora_layers(pipe))


def _require_peft() -> None:
    try:
        importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise MissingExtra("peft", "serve", "serving LoRAs") from error
