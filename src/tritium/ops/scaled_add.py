"""`x * scale + y` with a number as scale, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritium.ops.op import Op, Sample


def reference(x: torch.Tensor, scale: float, y: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    narrow = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return (x.to(wide) * scale + y.to(wide)).to(out_dtype or narrow)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(31)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, scale: float, y: torch.Tensor) -> dict[str, Any]:
        return {"x": x, "scale": scale, "y": y, "out_dtype": None}

    for scale, shape in ((1.0, (1, 7)), (0.5, (63, 100)), (-3.0, (2, 3072)), (1.5, (2, 5120))):
        yield Sample(f"scale {scale}", arguments(random(*shape), scale, random(*shape)))
    yield Sample("transposed", arguments(random(60, 7).t(), 0.25, random(7, 60)))
    yield Sample("nothing", arguments(random(0, 7), 2.0, random(0, 7)))


OP = Op(
    name="scaled_add",
    reference=reference,
    samples=samples,
)
