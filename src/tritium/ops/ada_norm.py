"""`norm(x) * (1 + scale) + shift`, the adaptive norm of diffusion transformers, in float32 and rounded once.

`norm` is "layer", "rms" or "none"; weight and bias belong to the norm; shift is optional. Scale and shift are
broadcast against x: [B, H], already viewed as [B, 1, H], or one row per token, [B, S, H].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Draw, Op, Samples


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    return normed_and_modulated(value, weight, bias, scale, shift, eps, norm).to(out_dtype or x.dtype)


def normed_and_modulated(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
) -> torch.Tensor:
    """Return the adaptive norm of a value in float32 or float64, without rounding."""
    if norm == "layer":
        value = F.layer_norm(value, (value.shape[-1],), None, None, eps)
    elif norm == "rms":
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        value = value * weight.to(value.dtype)
    if bias is not None:
        value = value + bias.to(value.dtype)
    if scale is not None:
        value = value * (1 + scale.to(value.dtype))
    return value if shift is None else value + shift.to(value.dtype)


def draw_samples(draw: Draw) -> Samples:
    def arguments(x: torch.Tensor, norm: str, *, affine: bool = False) -> dict[str, Any]:
        batch, _, width = x.shape
        weight, bias = draw(width) if affine else None, draw(width) if affine and norm == "layer" else None
        given = {"x": x, "weight": weight, "bias": bias, "scale": draw(batch, 1, width), "shift": draw(batch, 1, width)}
        return {**given, "eps": 1e-6, "norm": norm}

    for tokens, width in ((1, 7), (7, 60), (63, 100), (2, 3072), (3, 5120)):
        for norm in ("layer", "rms"):
            yield f"{norm}, {tokens} tokens of {width}", arguments(draw(2, tokens, width), norm, affine=tokens > 10)
    yield "no norm", arguments(draw(2, 7, 128), "none")
    by_token = {"scale": draw(2, 7, 128), "shift": draw(2, 7, 128)}
    yield "one value a token", {**arguments(draw(2, 7, 128), "layer"), **by_token}
    yield "no shift", {**arguments(draw(2, 7, 128), "rms", affine=True), "shift": None}
    yield "transposed", arguments(draw(2, 60, 63).transpose(1, 2), "layer", affine=True)
    yield "no tokens", arguments(draw(2, 0, 128), "layer")


OP = Op("ada_norm", reference, draw_samples)
