"""The reference and samples of `wide_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Sample


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)
    promised = empty_result(q, v)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def empty_result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Allocate the result for heads-first q and v, with the heads of a token adjacent in memory."""
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(47)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(
        queries: int,
        keys: int,
        *,
        width: int = 512,
        value_width: int | None = None,
        heads: int = 1,
        batch: int = 1,
        tokens_first: bool = True,
        scale: float | None = None,
    ) -> dict[str, Any]:
        def tokens(count: int, width: int) -> torch.Tensor:
            if tokens_first:
                return random(batch, count, heads * width).view(batch, count, heads, width).transpose(1, 2)
            return random(batch, heads, count, width)

        made = {"q": tokens(queries, width), "k": tokens(keys, width), "v": tokens(keys, value_width or width)}
        return {**made, "scale": width**-0.5 if scale is None else scale}

    yield Sample("a VAE's middle", arguments(64, 64))
    yield Sample("one token", arguments(1, 1))
    yield Sample("odd sizes", arguments(63, 100))
    yield Sample("several samples", arguments(7, 63, batch=3))
    yield Sample("several heads", arguments(63, 7, heads=2, width=320))
    yield Sample("samples and heads", arguments(7, 100, batch=2, heads=3, width=264))
    yield Sample("heads first in memory", arguments(63, 63, batch=2, heads=2, width=320, tokens_first=False))
    yield Sample("an odd width", arguments(7, 7, width=261, value_width=63, heads=2))
    yield Sample("narrow heads", arguments(63, 100, heads=2, width=64))
    yield Sample("a negative scale", arguments(7, 60, scale=-0.1))
    # Few keys have almost all the weight.
    yield Sample("a large scale", arguments(7, 60, width=264, scale=0.2))
    sides = [random(1, 1, 320, count).transpose(2, 3) for count in (60, 63, 63)]
    yield Sample("columns far apart", {**dict(zip("qkv", sides, strict=True)), "scale": 0.05})
    one = random(1, 1, 63, 320)
    yield Sample(
        "keys shared by samples",
        {"q": random(3, 1, 7, 320), "k": one.expand(3, 1, 63, 320), "v": one.expand(3, 1, 63, 320), "scale": 0.05},
    )
    yield Sample("many queries", arguments(3072, 60, width=320))
    yield Sample("many keys", arguments(7, 5120, width=320))
    yield Sample("no queries", arguments(0, 7))
    yield Sample("no samples", arguments(7, 7, batch=0))
