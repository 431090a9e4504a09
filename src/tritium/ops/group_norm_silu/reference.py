"""The reference and samples of `group_norm_silu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.memory_format import laid_as, with_offset
from tritium.ops.op import Sample


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    own = {name: part.to(wide) for name, part in (("weight", weight), ("bias", bias)) if part is not None}
    out = F.silu(F.group_norm(with_offset(x.to(wide), offset), groups, eps=eps, **own)).to(out_dtype or x.dtype)
    return laid_as(x, out)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(19)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, groups: int, *, affine: bool = True, offset: bool = False) -> dict[str, Any]:
        channels = x.shape[1]
        weight, bias = (random(channels), random(channels)) if affine else (None, None)
        more = {"offset": random(channels)} if offset else {}
        return {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": 1e-6, "out_dtype": None, **more}

    def last(x: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)

    yield Sample("image", arguments(random(2, 64, 7, 9), 32))
    yield Sample("one pixel", arguments(random(1, 32, 1, 1), 8))
    yield Sample("one pixel, channels last", arguments(last(random(2, 32, 1, 1)), 8))
    yield Sample("no pixels, only channels", arguments(random(3, 60), 6))
    yield Sample("odd sizes", arguments(random(1, 63, 5, 100), 7))
    yield Sample("odd sizes, channels last", arguments(last(random(1, 63, 5, 100)), 7))
    yield Sample("video", arguments(random(1, 60, 3, 5, 7), 4, affine=False))
    yield Sample("video, channels last", arguments(last(random(2, 60, 3, 5, 7)), 4, affine=False))
    yield Sample("many channels", arguments(random(1, 3072, 3), 32))
    yield Sample("more channels", arguments(random(1, 5120, 2), 32))
    yield Sample("channels last", arguments(last(random(2, 64, 8, 8)), 32))
    yield Sample("a group a channel", arguments(random(2, 7, 6, 6), 7))
    yield Sample("one group", arguments(last(random(2, 7, 6, 6)), 1))
    # Farther from zero no norm in float32 is exact, including the reference.
    yield Sample("far from zero", arguments(random(1, 32, 9, 16) + 30, 8))
    yield Sample("every second column", arguments(random(2, 60, 4, 14)[..., ::2], 6))
    yield Sample("some channels of more, channels last", arguments(last(random(2, 64, 5, 5))[:, :60], 6))
    yield Sample("groups over several programs", arguments(random(2, 6, 61, 50), 2))
    yield Sample("groups over several programs, channels last", arguments(last(random(2, 60, 37, 23)), 6))
    yield Sample("an offset", arguments(random(2, 60, 5, 7), 6, offset=True))
    yield Sample("an offset, channels last", arguments(last(random(2, 63, 5, 7)), 7, offset=True, affine=False))
    yield Sample("an offset, several programs", arguments(random(1, 6, 61, 50), 2, offset=True))
    yield Sample("an offset, several programs, channels last", arguments(last(random(2, 60, 37, 23)), 6, offset=True))
    yield Sample("no images", arguments(random(0, 64, 4, 4), 32))
