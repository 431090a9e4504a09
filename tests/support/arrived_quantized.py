"""Weights and linears as other libraries hand them over quantized, without these libraries."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class PerRow:
    """A scale for each row, by the name that torchao has for it."""


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """One scale."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    granularity: object = dataclasses.field(default_factory=PerRow)


ROWS, WHOLE = Inputs(), Inputs(PerTensor())


class Int8Tensor(torch.Tensor):
    """A tensor of a class, attributes and parts as torchao's; its products are computed from dequantized values."""

    @staticmethod
    def __new__(cls, qdata, scale, act_quant_kwargs, dtype):
        options = {"strides": qdata.stride(), "dtype": dtype, "device": qdata.device}
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, **options)

    def __init__(self, qdata, scale, act_quant_kwargs, dtype):
        self.qdata, self.scale, self.act_quant_kwargs = qdata, scale, act_quant_kwargs

    def __tensor_flatten__(self):
        return ["qdata", "scale"], (self.act_quant_kwargs, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, parts, attributes, size, stride):
        return cls(parts["qdata"], parts["scale"], *attributes)

    def dequantize(self):
        return (self.qdata.float() * self.scale).to(self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            given = args[0]
            return type(given)(given.qdata, given.scale, given.act_quant_kwargs, given.dtype)
        plain = [value.dequantize() if isinstance(value, Int8Tensor) else value for value in args]
        return function(*plain, **(kwargs or {}))


class Float8Tensor(Int8Tensor):
    """The same for float8."""


def weight_of(linear, kind, inputs):
    """Return a linear's weight in the class of torchao."""
    dtype, largest = (torch.int8, 127) if kind is Int8Tensor else (torch.float8_e4m3fn, 448)
    scale = linear.weight.detach().float().abs().amax(1, keepdim=True) / largest
    values = linear.weight.detach().float() / scale
    values = values.round() if kind is Int8Tensor else values
    return nn.Parameter(kind(values.to(dtype), scale, inputs, linear.weight.dtype), requires_grad=False)


class Projections(nn.Module):
    """A norm, and two linears that read its result."""

    def __init__(self, kind=None, inputs=ROWS, width=64):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.requires_grad_(requires_grad=False)
        for linear in (self.a, self.b) if kind is not None else ():
            linear.weight = weight_of(linear, kind, inputs)

    def forward(self, x):
        x = self.norm(x)
        return self.a(x), self.b(x)


class RowFloat8(nn.Linear):
    """A linear that quantizes its rows by their largest magnitude, in the order of operations that diffusers has on GPUs."""

    def __init__(self, columns, rows):
        super().__init__(columns, rows, dtype=torch.bfloat16)
        scale = self.weight.detach().float().abs().amax(1) / 448
        values = (self.weight.detach().float() / scale[:, None]).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias.requires_grad_(requires_grad=False)
        self.register_buffer("weight_scale", scale)

    def dequantized(self):
        return self.weight.float() * self.weight_scale[:, None]

    def forward(self, x):
        rows = x.reshape(-1, self.in_features).float()
        scale = (rows.abs().amax(dim=1, keepdim=True) / 448.0).clamp(min=1e-12)
        q = (rows / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        sides = (q, self.weight.T, scale, self.weight_scale[None, :])
        out = torch._scaled_mm(*sides, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out.reshape(*x.shape[:-1], self.out_features).to(torch.bfloat16) + self.bias


def exactly(linear, x):
    """The product of dequantized values in float64."""
    weight = linear.dequantized() if isinstance(linear, RowFloat8) else linear.weight.dequantize()
    return F.linear(x.double(), weight.double(), linear.bias.double())
