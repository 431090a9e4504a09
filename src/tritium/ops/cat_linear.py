"""`linear(cat(parts, dim=-1), weight, bias)`: a projection of values that lie side by side, computed as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops.op import Op, Sample


def reference(
    parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    return F.linear(torch.cat(parts, dim=-1), weight, bias).to(out_dtype or weight.dtype)


def fake(
    parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    del bias
    return parts[0].new_empty((*parts[0].shape[:-1], weight.shape[0]), dtype=out_dtype or weight.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(29)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(parts: list[torch.Tensor], out: int, *, bias: bool = True) -> dict[str, Any]:
        width = sum(part.shape[-1] for part in parts)
        weight = random(out, width) / width**0.5
        return {"parts": parts, "weight": weight, "bias": random(out) if bias else None, "out_dtype": None}

    yield Sample("awkward", arguments([random(2, 7, 63), random(2, 7, 100)], 1))
    # Wide on the way out: how a GEMM rounds long sums is not this op's to define.
    yield Sample("wide", arguments([random(1, 7, 60), random(1, 7, 4)], 3072, bias=False))
    yield Sample("wider", arguments([random(1, 7, 60), random(1, 7, 4)], 5120))
    yield Sample("three parts", arguments([random(2, 1), random(2, 60), random(2, 7)], 100))
    yield Sample("transposed", arguments([random(2, 60, 7).transpose(1, 2), random(2, 7, 63)], 7))
    yield Sample("no rows", arguments([random(0, 60), random(0, 7)], 7))


OP = Op(
    name="cat_linear",
    schema="(Tensor[] parts, Tensor weight, Tensor? bias, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
)
