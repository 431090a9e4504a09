"""`norm(x) * (1 + scale) + shift`, the adaptive norm of diffusion transformers.

It is computed in float32 and rounded once.

`norm` is "layer", "rms" or "none"; weight and bias belong to the norm; shift is optional. Scale and shift are
broadcast against x: [B, H], already viewed as [B, 1, H], or one row per token, [B, S, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Op, Sample


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if norm == "layer":
        value = F.layer_norm(value, (x.shape[-1],), None, None, eps)
    elif norm == "rms":
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        value = value * weight.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    value = value * (1 + scale.to(wide))
    if shift is not None:
        value = value + shift.to(wide)
    return value.to(out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(13)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, modulation: tuple[int, ...], norm: str, *, affine: bool) -> dict[str, Any]:
        width = x.shape[-1]
        return {
            "x": x,
            "weight": random(width) if affine else None,
            "bias": random(width) if affine and norm == "layer" else None,
            "scale": random(*modulation),
            "shift": random(*modulation),
            "eps": 1e-6,
            "norm": norm,
            "out_dtype": None,
        }

    for tokens, width in ((1, 7), (7, 60), (63, 100), (100, 63), (2, 3072), (3, 5120)):
        for norm in ("layer", "rms"):
            label = f"{norm}, {tokens} tokens of {width}"
            yield Sample(label, arguments(random(2, tokens, width), (2, 1, width), norm, affine=tokens > 10))
    yield Sample("no norm", arguments(random(2, 7, 128), (2, 1, 128), "none", affine=False))
    yield Sample("one value a token", arguments(random(2, 7, 128), (2, 7, 128), "layer", affine=False))
    without = arguments(random(2, 7, 128), (2, 1, 128), "rms", affine=True)
    yield Sample("no shift", {**without, "shift": None})
    yield Sample("transposed", arguments(random(2, 60, 63).transpose(1, 2), (2, 1, 60), "layer", affine=True))
    yield Sample("no tokens", arguments(random(2, 0, 128), (2, 1, 128), "layer", affine=False))


OP = Op(
    name="ada_norm",
    reference=reference,
    samples=samples,
)
