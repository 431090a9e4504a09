"""`silu(group_norm(x))`, the pair in front of every convolution of a UNet or VAE, computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops.op import Op, Sample


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    own = {name: part.to(wide) for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    return F.silu(F.group_norm(x.to(wide), groups, eps=eps, **own)).to(out_dtype or x.dtype)


def fake(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    del groups, weight, bias, eps
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(19)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, groups: int, *, affine: bool = True) -> dict[str, Any]:
        channels = x.shape[1]
        weight, bias = (random(channels), random(channels)) if affine else (None, None)
        return {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": 1e-6, "out_dtype": None}

    yield Sample("image", arguments(random(2, 64, 7, 9), 32))
    yield Sample("one pixel", arguments(random(1, 32, 1, 1), 8))
    yield Sample("odd sizes", arguments(random(1, 63, 5, 100), 7))
    yield Sample("video", arguments(random(1, 60, 3, 5, 7), 4, affine=False))
    yield Sample("many channels", arguments(random(1, 3072, 3), 32))
    yield Sample("more channels", arguments(random(1, 5120, 2), 32))
    yield Sample("channels last", arguments(random(2, 64, 8, 8).to(memory_format=torch.channels_last), 32))
    yield Sample("no images", arguments(random(0, 64, 4, 4), 32))


OP = Op(
    name="group_norm_silu",
    schema="(Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
)
