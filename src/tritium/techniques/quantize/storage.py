"""Linears that store quantized bytes: `keep="cpu"`.

The parameter `weight` holds the bytes as int8, whatever the format: `module.to(torch.bfloat16)` casts floating point
parameters, and would cast float8 bytes to numbers without their scales. Scales are a buffer of bytes for the same reason.
The original weight stays in host memory: `state_dict` returns it, and `restore` puts it back bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from tritium.compat.peft import MERGES
from tritium.compiler.passes.quantize import INLINED, PRODUCTS, Precision, choose_product, weight_quantizer
from tritium.config import CompilationConfig
from tritium.errors import PipelineError
from tritium.ops import scaled_linear

# The buffer with the bytes of the scales.
SCALE = "weight_scale"

# The buffer with the bytes of 4-bit weights. Their parameter keeps its shape, which diffusers compares with a LoRA's, and
# holds one zero.
BYTES = "weight_bytes"

# Rows with which the provider of a product is chosen: many, as image tokens are.
_ROWS = 4096


@dataclass
class Stored:
    """The original weight of a linear in host memory, and how its bytes are used."""

    original: torch.Tensor
    strides: tuple[int, ...]
    requires_grad: bool
    precision: Precision
    # The provider of the product in 8 bits; empty if only the weight is quantized.
    provider: str


class StoredLinear(nn.Linear):
    """A linear whose weight is stored in 8 or 4 bits. `store` changes a linear to it, and `restore` back."""

    stored: Stored

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in nn.Linear
        if self.weight.is_floating_point():
            # Other code has put a weight of its own here, as accelerate's sequential offloading does.
            return F.linear(input, self.weight, self.bias)
        how, scale = self.stored.precision, getattr(self, SCALE).view(torch.float32)
        if how.format not in PRODUCTS:
            is_packed = how.format == "int4-weights"
            weight = getattr(self, BYTES).view(torch.uint8) if is_packed else self.weight
            return torch.ops.tritium.weight_only_linear(  # type: ignore[no-any-return]  # operators have no types
                input, weight, scale, self.bias, provider=INLINED
            )
        dtype = PRODUCTS[how.format]
        q, rows = torch.ops.tritium.quantize_rows(input, dtype, how.rotate, None, provider=INLINED)
        weight = self.weight.view(dtype)
        return torch.ops.tritium.scaled_linear(  # type: ignore[no-any-return]  # operators have no types
            q, rows, weight, scale, self.bias, input.dtype, provider=self.stored.provider
        )

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Hold the original weight inside the context, and quantize what it is then."""
        how = self.stored.precision
        restore(self)
        try:
            yield
        finally:
            store(self, how)

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        before = self.stored.original
        wanted = fn(torch.empty(0, dtype=before.dtype, device=self.weight.device)).dtype
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if hasattr(self, BYTES):
            # Moving a tensor writes all of its elements.
            _write_placeholder(self)
        if wanted != before.dtype and not self.weight.is_floating_point():
            self._take(before.to(wanted))
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.weight.is_floating_point():
            destination[f"{prefix}weight"] = self.stored.original

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        missing, errors = others[2], others[4]
        rest = {name: value for name, value in state_dict.items() if name != f"{prefix}weight"}
        super()._load_from_state_dict(rest, prefix, *others)
        if weight is None:
            return
        missing.remove(f"{prefix}weight") if f"{prefix}weight" in missing else None
        if weight.shape != self.stored.original.shape:
            errors.append(
                f"size mismatch for {prefix}weight: copying a param with shape {tuple(weight.shape)} from checkpoint, "
                f"the shape in current model is {tuple(self.stored.original.shape)}."
            )
            return
        self._take(weight.detach().to("cpu", self.stored.original.dtype))

    def _take(self, original: torch.Tensor) -> None:
        """Store another weight."""
        with torch.inference_mode(False), torch.no_grad():
            self.stored.original = _on_host(original, self.weight.device)
            _write_bytes(self, original.to(self.weight.device))


def store(linear: nn.Linear, precision: Precision) -> None:
    """Change a linear to one that stores quantized bytes; raise a `PipelineError` if it cannot be."""
    weight = linear.weight
    reason = decline(linear, precision)
    if reason is not None:
        raise PipelineError(reason)
    provider = _provider(weight, precision)[0]
    with torch.inference_mode(False), torch.no_grad():
        original = weight.detach()
        stored = Stored(_on_host(original, weight.device), original.stride(), weight.requires_grad, precision, provider)
        weight.requires_grad_(False)
        _become(linear, StoredLinear)
        assert isinstance(linear, StoredLinear)
        linear.stored = stored
        _write_bytes(linear, original)


def restore(linear: nn.Module) -> None:
    """Give a linear its original weight back, or leave the one that other code has put there."""
    assert isinstance(linear, StoredLinear)
    if not linear.weight.is_floating_point():
        _restore_weight(linear)
    delattr(linear, SCALE)
    if hasattr(linear, BYTES):
        delattr(linear, BYTES)
    del linear.stored
    _become(linear, nn.Linear)


def _restore_weight(linear: StoredLinear) -> None:
    stored = linear.stored
    with torch.inference_mode(False), torch.no_grad():
        weight = stored.original
        if weight.device != linear.weight.device or weight.stride() != stored.strides:
            weight = torch.empty_strided(
                weight.shape, stored.strides, dtype=weight.dtype, device=linear.weight.device
            ).copy_(weight)
        linear.weight.data = weight
        linear.weight.requires_grad_(stored.requires_grad)


def bytes_of(shape: Sequence[int], precision: Precision) -> int:
    """Return the bytes of a quantized weight [N, K] and its scales.

    >>> bytes_of((3072, 3072), Precision("fp8")), bytes_of((3072, 3072), Precision("int4-weights", group=64))
    (9449472, 5308416)
    """
    n, k = shape
    if precision.format == "int4-weights":
        return n * k // 2 + 4 * n * (k // precision.group)
    return n * k + 4 * n


def _become(linear: Any, kind: type[nn.Linear]) -> None:
    linear.__class__ = kind


def decline(linear: nn.Linear, precision: Precision) -> str | None:
    """Return why a linear cannot store quantized bytes, or None."""
    if type(linear) is not nn.Linear:
        return f"its class is {type(linear).__name__}, whose forward may do more than a product"
    weight = linear.weight
    if type(weight) is not nn.Parameter or weight.is_meta or not weight.is_floating_point():
        return f"its weight is a {type(weight).__name__} of {weight.dtype} on {weight.device}"
    columns = weight.shape[1]
    step = precision.group if precision.format == "int4-weights" else precision.rotate
    if step and columns % step:
        return f"its {columns} columns are no multiple of {step}"
    provider, why = _provider(weight, precision)
    return None if provider or precision.format not in PRODUCTS else why


def choose_provider(linear: StoredLinear, where: torch.device) -> None:
    """Choose the provider of the product for another device than that of the weight."""
    stored = linear.stored
    provider, why = _provider(stored.original, stored.precision, where)
    if stored.precision.format in PRODUCTS and not provider:
        raise PipelineError(why)
    stored.provider = provider


def _provider(weight: torch.Tensor, precision: Precision, where: torch.device | None = None) -> tuple[str, str]:
    if precision.format not in PRODUCTS:
        return "", ""
    dtype, (n, k), where = PRODUCTS[precision.format], weight.shape, where or weight.device
    empty = {
        "q": torch.empty_strided((_ROWS, k), (0, 0), dtype=dtype, device=where),
        "scale": torch.empty_strided((_ROWS, 1), (0, 0), dtype=torch.float32, device=where),
        "weight": torch.empty_strided((n, k), (0, 0), dtype=dtype, device=where),
        "weight_scale": torch.empty((n, 1), dtype=torch.float32, device=where),
    }
    given = {**empty, "bias": None, "out_dtype": weight.dtype}
    return choose_product(scaled_linear.OP, given, CompilationConfig(), where.type)


def _write_bytes(linear: StoredLinear, original: torch.Tensor) -> None:
    quantize, options = weight_quantizer(linear.stored.precision)
    weight, scale = quantize(original, *options)
    if linear.stored.precision.format == "int4-weights":
        linear.register_buffer(BYTES, weight.contiguous().view(torch.int8), persistent=False)
        _write_placeholder(linear)
    else:
        linear.weight.data = weight.contiguous().view(torch.int8)
    linear.register_buffer(SCALE, scale.contiguous().view(torch.int8), persistent=False)


def _write_placeholder(linear: StoredLinear) -> None:
    zero = torch.zeros(1, dtype=torch.int8, device=getattr(linear, BYTES).device)
    linear.weight.data = zero.expand(linear.stored.original.shape)


def _on_host(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a weight on a CPU itself, mapped from its file if it was, or a copy in host memory.

    Not page-locked: PyTorch would round each allocation up to a power of two, and originals are rarely read.
    """
    return weight if device.type == "cpu" else weight.to("cpu")


def watch_merges() -> None:
    """Let merges of adapters find the original weights."""
    MERGES.watch()
