"""The reference and samples of `channel_norm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.memory_format import laid_as, with_offset
from tritium.ops.op import Sample


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    shift: float,
    dim: int,
    eps: float,
    silu: bool,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.normalize(with_offset(x.to(wide), offset, dim), dim=dim, eps=eps) * scale * weight.to(wide) + shift
    return laid_as(x, (F.silu(normed) if silu else normed).to(out_dtype or x.dtype))


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(37)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, *, silu: bool = False, shift: float = 0.0, offset: bool = False) -> dict[str, Any]:
        channels = x.shape[1]
        weight = random(channels, *[1] * (x.dim() - 2))
        numbers = {"scale": channels**0.5, "shift": shift, "dim": 1, "eps": 1e-12}
        more = {"offset": random(channels)} if offset else {}
        return {"x": x, "weight": weight, **numbers, "silu": silu, "out_dtype": None, **more}

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)

    yield Sample("video", arguments(random(1, 96, 3, 5, 7)))
    yield Sample("image", arguments(random(2, 63, 7, 100), silu=True))
    yield Sample("one channel", arguments(random(1, 1, 5, 5)))
    yield Sample("many channels", arguments(random(1, 3072, 2)))
    yield Sample("more channels", arguments(random(1, 5120, 2), silu=True))
    yield Sample("channels last", arguments(last(random(2, 64, 8, 8)), shift=0.5))
    yield Sample("video, channels last", arguments(last(random(1, 96, 3, 5, 7)), silu=True))
    yield Sample("odd sizes, channels last", arguments(last(random(1, 63, 7, 9)), silu=True))
    yield Sample("one channel, channels last", arguments(last(random(2, 1, 5, 5)), silu=True))
    yield Sample("many channels, channels last", arguments(last(random(1, 3072, 2, 3)), silu=True))
    yield Sample("more channels, channels last", arguments(last(random(1, 5120, 2, 2))))
    yield Sample("three tiles, channels last", arguments(last(random(1, 384, 3, 5, 7)), silu=True))
    yield Sample("some channels of more, channels last", arguments(last(random(2, 64, 5, 5))[:, :60], silu=True))
    yield Sample("an offset", arguments(random(2, 63, 5, 7), silu=True, offset=True))
    yield Sample("an offset, channels last", arguments(last(random(2, 63, 5, 7)), silu=True, offset=True))
    yield Sample("an offset, three tiles, channels last", arguments(last(random(1, 96, 3, 5, 7)), offset=True))
    # Pixels that are zero in all channels stay zero.
    yield Sample("zeros, channels last", arguments(last(random(1, 96, 4, 4)) * 0, silu=True))
    yield Sample("no frames", arguments(random(1, 96, 0, 5, 7)))
