"""`gelu(linear(x, weight, bias))`, computed as written: a GEMM whose epilogue is the activation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.ops.op import NARROW, Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate).to(out_dtype or x.dtype)


def arguments(draw: Draw, x: torch.Tensor, n: int, approximate: str = "tanh", *, bias: bool = True) -> dict[str, Any]:
    weight = draw(n, x.shape[-1]) / x.shape[-1] ** 0.5
    return {"x": x, "weight": weight, "bias": draw(n) if bias else None, "approximate": approximate}


def draw_samples(draw: Draw) -> Samples:
    for approximate in ("tanh", "none"):
        yield f"{approximate}, awkward", arguments(draw, draw(2, 7, 63), 100, approximate)
    # Wide in the output: the op does not define how a GEMM rounds long sums.
    yield "wide", arguments(draw, draw(1, 7), 3072)
    yield "wider", arguments(draw, draw(1, 60), 5120, bias=False)
    yield "transposed", arguments(draw, draw(2, 60, 7).transpose(1, 2), 1, "none")
    yield "no rows", arguments(draw, draw(0, 60), 7)


def run_aten(given: Arguments) -> torch.Tensor:
    """Call cuBLAS, which computes the activation in the product's epilogue, on the float32 sums."""
    x, weight = given.x, given.weight
    rows = compat.operators.linear_gelu(x.reshape(-1, x.shape[-1]), weight, given.bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def decline_aten(given: Arguments) -> str | None:
    x, bias = given.x, given.bias
    if x.device.type != "cuda":
        return f"only CUDA has a product with a tanh GELU in its epilogue, this graph runs on {x.device.type}"
    if given.approximate != "tanh":
        return "the epilogue computes the tanh form of GELU, the model has the erf form"
    if bias is None:
        return "the epilogue needs a bias"
    if {x.dtype, given.weight.dtype, bias.dtype, given.out_dtype or x.dtype} != {x.dtype}:
        return "input, weight, bias and result have different dtypes"
    return None


def shape(given: Arguments) -> Shape:
    x, weight = given.x, given.weight
    return {"tokens": octave(count(x.shape[:-1])), "k": octave(weight.shape[1]), "n": octave(weight.shape[0])}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    return arguments(draw, draw(1, shape["tokens"], shape["k"]), shape["n"])


def block(shape: Any, draw: Draw) -> Block:
    """Return a feed-forward whose second projection is narrow."""
    given = alone(shape, draw)
    inputs = (given["x"], given["weight"], given["bias"], draw(NARROW, shape["n"]) / shape["n"] ** 0.5)

    def feed_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, weight, bias), approximate="tanh"), out)

    return feed_forward, inputs


# FLUX and Qwen-Image (text and image), Wan 14B (text and video), SD3.5, Wan 1.3B.
STANDARD = (
    (256, 4096, 16384),
    (4096, 2048, 8192),
    (4096, 4096, 16384),
    (32768, 2048, 8192),
    (32768, 4096, 16384),
)
TRIAL = Trial.in_block(shape, alone, block, "tokens k n", STANDARD)

PROVIDER = Provider("aten", "linear_gelu", run_aten, decline_aten, traced=True)
OP = Op("linear_gelu", reference, draw_samples, (PROVIDER,), trial=TRIAL)
