"""`gelu(linear(x, weight, bias))`, computed as written: a GEMM whose epilogue is the activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from tritium.ops.op import Op, Sample


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str, out_dtype: torch.dtype | None
) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate).to(out_dtype or x.dtype)


def fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str, out_dtype: torch.dtype | None
) -> torch.Tensor:
    del bias, approximate
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(23)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(x: torch.Tensor, out: int, approximate: str, *, bias: bool = True) -> dict[str, Any]:
        weight = random(out, x.shape[-1]) / x.shape[-1] ** 0.5
        own = random(out) if bias else None
        return {"x": x, "weight": weight, "bias": own, "approximate": approximate, "out_dtype": None}

    for approximate in ("tanh", "none"):
        yield Sample(f"{approximate}, awkward", arguments(random(2, 7, 63), 100, approximate))
    # Wide on the way out: how a GEMM rounds long sums is not this op's to define.
    yield Sample("wide", arguments(random(1, 7), 3072, "tanh"))
    yield Sample("wider", arguments(random(1, 60), 5120, "tanh", bias=False))
    yield Sample("transposed", arguments(random(2, 60, 7).transpose(1, 2), 1, "none"))
    yield Sample("no rows", arguments(random(0, 60), 7, "tanh"))


OP = Op(
    name="linear_gelu",
    schema="(Tensor x, Tensor weight, Tensor? bias, str approximate, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
)
