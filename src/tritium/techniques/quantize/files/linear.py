"""A linear that runs a layer of a quantized checkpoint: there is no other weight.

The parameter `weight` holds bytes as int8, whatever the format, and scales are buffers of bytes: `module.to(torch.bfloat16)`
would cast float8 values without their scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn

from tritium.compiler.passes.quantize import INLINED, choose_product
from tritium.config import CompilationConfig
from tritium.errors import PipelineError
from tritium.layers.steps import Policy, step_of
from tritium.ops import REFERENCE, scaled_linear
from tritium.ops.quantize_rows import INT8, int8_scales
from tritium.techniques.quantize.files.layer import QuantizedLayer

# The number of rows for which the provider of a product is chosen: many, as image tokens are.
_ROWS = 4096

# Fields of a layer that are float32 tensors.
_TENSORS = ("scale", "offset", "input_scale", "input_offset", "smooth")


class QuantizedLinear(nn.Linear):
    """A linear layer with quantized bytes as its weight."""

    static_steps: torch.Tensor

    def __init__(self, layer: QuantizedLayer, dtype: torch.dtype, policy: Policy | None = None) -> None:
        rows, columns = layer.values.shape
        super().__init__(columns, rows, bias=layer.bias is not None, device="meta", dtype=dtype)
        # Its tensors are parameters and buffers of this module.
        none: dict[str, Any] = dict.fromkeys(_TENSORS[1:])
        self.layer = dataclasses.replace(layer, values=layer.values[:0], scale=layer.scale[:0], bias=None, **none)
        self.kind, self.compute_dtype = layer.values.dtype, dtype
        self.weight = nn.Parameter(layer.values.contiguous().view(torch.int8), requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
        for name in _TENSORS:
            value = getattr(layer, name)
            self.register_buffer(f"weight_{name}", None if value is None else value.contiguous().view(torch.int8))
        if layer.input == "step":
            assert layer.input_scale is not None
            static = (policy or Policy()).static_steps(layer.input_scale.numel())
            self.register_buffer("static_steps", static, persistent=False)
        self.settle()

    def _provider(self) -> str:
        if self.layer.input == "none":
            return ""
        where, (n, k) = self.weight.device, self.weight.shape
        given = {
            "q": torch.empty_strided((_ROWS, k), (0, 0), dtype=self.kind, device=where),
            "scale": torch.empty_strided((_ROWS, 1), (0, 0), dtype=torch.float32, device=where),
            "weight": torch.empty_strided((n, k), (0, 0), dtype=self.kind, device=where),
            "weight_scale": torch.empty((n, 1), dtype=torch.float32, device=where),
            "bias": None,
            "out_dtype": self.compute_dtype,
        }
        # What no product takes is computed from dequantized values: the file has no other weight.
        return choose_product(scaled_linear.OP, given, CompilationConfig(), where.type)[0] or REFERENCE

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.weight.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=before)).dtype
        if self.weight.device != before and not self.weight.is_meta:
            self.settle()
        return self

    def settle(self) -> None:
        """Choose the provider for the device that the tensors are on now."""
        self.provider = self._provider()
        if self.layer.input == "step":
            # Created here: compiled code reads it.
            step_of(self.weight.device)

    def part(self, name: str) -> torch.Tensor | None:
        """Return a float32 tensor of the layer, or None."""
        found = getattr(self, f"weight_{name}")
        return None if found is None else found.view(torch.float32)

    @property
    def stored(self) -> QuantizedLayer:
        """Return the layer as the file had it."""
        parts: dict[str, Any] = {name: self.part(name) for name in _TENSORS}
        bias = self.bias if self.bias is not None else None
        return dataclasses.replace(self.layer, values=self.weight.view(self.kind), bias=bias, **parts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        x, smooth = input, self.part("smooth")
        if smooth is not None:
            x = (x * smooth).to(input.dtype)
        if self.layer.input == "none":
            return self._from_weights(x)
        if self.layer.input == "step" or (self.part("input_offset") is not None):
            return self._with_offset(x)
        scale, static = self.part("scale"), self.part("input_scale")
        q, rows = torch.ops.tritium.quantize_rows(x, self.kind, self.layer.rotate, static, provider=INLINED)
        return self._product(q, rows, scale, self.bias, x.dtype)

    def _product(self, q: Any, rows: Any, scale: Any, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight.view(self.kind)
        return torch.ops.tritium.scaled_linear(  # type: ignore[no-any-return]  # operators have no types
            q, rows, weight, scale, bias, dtype, provider=self.provider
        )

    def _from_weights(self, x: torch.Tensor) -> torch.Tensor:
        scale, offset = self.part("scale"), self.part("offset")
        if self.kind == INT8 and offset is None and not self.layer.rotate:
            return torch.ops.tritium.weight_only_linear(  # type: ignore[no-any-return]  # operators have no types
                x, self.weight, scale, self.bias, provider=INLINED
            )
        layer = dataclasses.replace(self.stored, smooth=None)
        bias = self.bias
        return F.linear(x, layer.dequantized().to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _with_offset(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply inputs that were rounded around an offset: its product with the weight's rows is subtracted."""
        scale, wide = self.part("scale"), x.to(torch.float32)
        static, offset = self.part("input_scale"), self.part("input_offset")
        assert scale is not None
        assert static is not None
        offset = torch.zeros_like(static) if offset is None else offset
        if self.layer.input == "step":
            number = step_of(x.device)
            step = number.clamp(max=static.numel() - 1)
            # Steps beyond those of the file have a scale for each row.
            is_static = self.static_steps.index_select(0, step) & (number == step)
            rows = int8_scales(wide.abs().amax(-1, keepdim=True))[0]
            rows = torch.where(is_static, static.index_select(0, step), rows)
            offset = torch.where(is_static, offset.index_select(0, step), 0.0)
        else:
            rows = static.expand(*x.shape[:-1], 1)
        q = ((wide / rows).round() + offset).clamp(-128, 127).to(torch.int8)
        # A sum of columns: float32 holds it exactly, up to 2^24 / 128 columns.
        sums = self.weight.to(torch.float32).sum(1)
        bias = 0.0 if self.bias is None else self.bias.to(torch.float32)
        out = self._product(q, rows.contiguous(), scale, None, torch.float32)
        return (out - (offset * rows) * (sums * scale.reshape(-1)) + bias).to(x.dtype)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype != torch.int8:
            raise PipelineError(
                f"{prefix}weight is {weight.dtype}, and this linear holds a quantized checkpoint's bytes; load the weights into "
                "a model that was not read from one"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.layer.input} inputs, {self.kind}".replace("torch.", "")
