"""`normalize(x, dim) * scale * weight`: the RMSNorm over channels of video VAEs, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops.op import Op, Sample


def reference(
    x: torch.Tensor, weight: torch.Tensor, scale: float, dim: int, eps: float, out_dtype: torch.dtype | None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.normalize(x.to(wide), dim=dim, eps=eps) * scale
    return (normed * weight.to(wide)).to(out_dtype or x.dtype)


def fake(
    x: torch.Tensor, weight: torch.Tensor, scale: float, dim: int, eps: float, out_dtype: torch.dtype | None
) -> torch.Tensor:
    del weight, scale, dim, eps
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(37)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor) -> dict[str, Any]:
        channels = x.shape[1]
        weight = random(channels, *[1] * (x.dim() - 2))
        return {"x": x, "weight": weight, "scale": channels**0.5, "dim": 1, "eps": 1e-12, "out_dtype": None}

    yield Sample("video", arguments(random(1, 96, 3, 5, 7)))
    yield Sample("image", arguments(random(2, 63, 7, 100)))
    yield Sample("one channel", arguments(random(1, 1, 5, 5)))
    yield Sample("many channels", arguments(random(1, 3072, 2)))
    yield Sample("more channels", arguments(random(1, 5120, 2)))
    yield Sample("channels last", arguments(random(2, 64, 8, 8).to(memory_format=torch.channels_last)))
    yield Sample("no frames", arguments(random(1, 96, 0, 5, 7)))


OP = Op(
    name="channel_norm",
    schema="(Tensor x, Tensor weight, float scale, int dim, float eps, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
)
