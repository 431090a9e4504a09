"""Quantize linears while diffusers loads a model, weight by weight: `from_pretrained(..., quantization_config=...)`.

diffusers finds a quantizer by the `quant_method` of a config. Creating a `QuantizationConfig` adds Tritium's to its mapping.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from typing import Any

import torch
from torch import nn

from tritium.errors import ConfigError, MissingExtra, PipelineError
from tritium.techniques.choice import configured
from tritium.techniques.quantize.config import Quantize
from tritium.techniques.quantize.files.linear import QuantizedLinear
from tritium.techniques.quantize.files.writing import FORMATS, quantized
from tritium.techniques.quantize.selection import select


class Method(enum.StrEnum):
    """The name of the quantizer; diffusers reads its value."""

    TRITIUM = "tritium"


class QuantizationConfig:
    """Quantize a model's linears while `from_pretrained` loads it, so that the unquantized model is never in memory.

    Args:
        linear: The format of the linears: "fp8", "int8" or "int8-weights"; or a `Quantize`.
        fields: Other fields of `Quantize`, such as `layers`.

    Pass it as `quantization_config` to `from_pretrained` of a model. Its linears then hold quantized weights alone.
    """

    def __init__(self, linear: str | Quantize | None = "fp8", **fields: Any) -> None:
        if isinstance(linear, Quantize) and fields:
            raise ConfigError(
                f"QuantizationConfig takes a Quantize or its fields, got both: leave out {', '.join(fields)}"
            )
        named = {"linear": linear, **fields}
        self.quantize: Quantize = configured("QuantizationConfig", "quantize", linear if not fields else named)
        others = sorted(self.quantize.formats - set(FORMATS))
        if others or self.quantize.linear == "auto":
            listed = ", ".join(others) or "auto"
            raise ConfigError(f"models are loaded in {', '.join(FORMATS)}, not in {listed}")
        if self.quantize.steps is not None or self.quantize.scales != "row":
            raise ConfigError(
                "steps and static scales are for Plan(quantize=...); leave them out of QuantizationConfig"
            )
        self.quant_method = Method.TRITIUM
        register()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, as the config of a saved model holds them."""
        return {"quant_method": self.quant_method.value, **dataclasses.asdict(self.quantize)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], **_others: Any) -> QuantizationConfig:
        """Return the config that `to_dict` described."""
        fields = {name: value for name, value in values.items() if name != "quant_method"}
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "linear"})

    def __repr__(self) -> str:
        return f"QuantizationConfig({self.quantize!r})"


@functools.cache
def register() -> None:
    """Add the quantizer to diffusers."""
    try:
        auto = importlib.import_module("diffusers.quantizers.auto")
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers", "QuantizationConfig") from error
    auto.AUTO_QUANTIZER_MAPPING[Method.TRITIUM.value] = _quantizer()
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[Method.TRITIUM.value] = QuantizationConfig


def _quantizer() -> type:
    base: Any = importlib.import_module("diffusers.quantizers.base").DiffusersQuantizer

    class TritiumQuantizer(base):  # type: ignore[misc]  # diffusers has no types
        """Replace each selected linear when its weight is loaded."""

        use_keep_in_fp32_modules = True
        is_serializable = is_trainable = False
        is_compileable = True

        def _process_model_before_weight_loading(self, model: nn.Module, **_others: Any) -> None:
            # Names are checked here: an unknown layer fails before weights are read.
            self.chosen = select(model, self.quantization_config.quantize).chosen
            if not self.chosen:
                raise PipelineError(f"{type(model).__name__} has no linears in repeated blocks; name some in layers")

        def _process_model_after_weight_loading(self, model: nn.Module, **_others: Any) -> nn.Module:
            return model

        def check_if_quantized_param(
            self, _model: nn.Module, _value: Any, param_name: str, *_args: Any, **_others: Any
        ) -> bool:
            return param_name.removesuffix(".weight") in self.chosen and param_name.endswith(".weight")

        def create_quantized_param(
            self,
            model: nn.Module,
            param_value: torch.Tensor,
            param_name: str,
            target_device: Any,
            *_args: Any,
            **_others: Any,
        ) -> None:
            name = param_name.removesuffix(".weight")
            replace(model, name, param_value.to(target_device), self.chosen[name].format, self.torch_dtype)

        def check_quantized_param_shape(self, param_name: str, current_param: Any, loaded_param: Any) -> bool:
            if current_param.shape != loaded_param.shape:
                shapes = tuple(loaded_param.shape), tuple(current_param.shape)
                raise PipelineError(f"{param_name} has shape {shapes[0]} in the file, and {shapes[1]} in the model")
            return True

        def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
            self.torch_dtype = torch_dtype
            return torch_dtype

        def adjust_target_dtype(self, _dtype: Any) -> torch.dtype:
            return torch.int8

    return TritiumQuantizer


def replace(model: nn.Module, name: str, weight: torch.Tensor, format_: str, dtype: torch.dtype | None) -> None:
    """Replace a linear by a quantized one; its bias may be loaded before or later."""
    linear: Any = model.get_submodule(name)
    made = QuantizedLinear(quantized(weight, format_), dtype or weight.dtype)
    made.bias = linear.bias
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, made)
