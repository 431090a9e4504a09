"""One linear layer as a file stores it: quantized values, scales, and how its input is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from tritium.ops.quantize_rows import FP8, rotated

# The quantization of a layer's input: none, a scale for each row, one that was measured before, or one of both by step.
Input = Literal["none", "row", "static", "step"]


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """One linear layer.

    Args:
        values: The weight [N, K] as float8_e4m3fn or int8.
        scale: Float32 [N, 1]; a scale of a whole weight is repeated.
        offset: Float32 [N, 1] or None: the weight is `(values - offset) * scale`.
        bias: [N] or None.
        input: How the input is quantized.
        input_scale: Float32 [T], one number for each step, or [1].
        input_offset: Float32 like `input_scale`, or None: the input is `(q - offset) * scale`.
        rotate: The groups of columns of the weight that are rotated; the input must be rotated too.
        smooth: Float32 [K] or None: the input is multiplied by it before.
    """

    values: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    input: Input = "row"
    input_scale: torch.Tensor | None = None
    input_offset: torch.Tensor | None = None
    rotate: int = 0
    smooth: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """Return the format in the words of `Quantize`."""
        kind = "fp8" if self.values.dtype == FP8 else "int8"
        return f"{kind}-weights" if self.input == "none" else f"{kind}-rotated" if self.rotate else kind

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32, for inputs that are neither rotated nor smoothed."""
        weight = self.values.to(torch.float32)
        weight = (weight if self.offset is None else weight - self.offset) * self.scale
        # A rotation is its own inverse.
        weight = rotated(weight, self.rotate)
        return weight if self.smooth is None else weight * self.smooth


@dataclass(frozen=True)
class Checkpoint:
    """What a file or folder holds: quantized layers and the other tensors, by their names in the model."""

    format: str
    layers: Mapping[str, QuantizedLayer]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
