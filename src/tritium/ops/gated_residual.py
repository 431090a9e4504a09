"""`x + gate * y` with a gate that is broadcast over tokens.

It is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritium.ops.op import Op, Sample


def reference(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    narrow = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return (x.to(wide) + gate.to(wide) * y.to(wide)).to(out_dtype or narrow)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(shape: tuple[int, ...], gate: tuple[int, ...]) -> dict[str, Any]:
        return {"x": random(*shape), "gate": random(*gate), "y": random(*shape), "out_dtype": None}

    for tokens, width in ((1, 1), (7, 60), (63, 100), (100, 63), (2, 3072), (3, 5120)):
        yield Sample(f"{tokens} tokens of {width}", arguments((2, tokens, width), (2, 1, width)))
    yield Sample("one gate for the batch", arguments((2, 7, 128), (1, 1, 128)))
    yield Sample("a gate of rank 1", arguments((2, 7, 128), (128,)))
    yield Sample("a gate a token", arguments((2, 7, 128), (2, 7, 1)))
    yield Sample("image", arguments((2, 8, 5, 7), (2, 8, 1, 1)))
    transposed = arguments((2, 63, 60), (2, 1, 60))
    transposed["y"] = random(2, 60, 63).transpose(1, 2)
    yield Sample("transposed y", transposed)
    yield Sample("nothing", arguments((2, 0, 128), (2, 1, 128)))


OP = Op(
    name="gated_residual",
    reference=reference,
    samples=samples,
)
