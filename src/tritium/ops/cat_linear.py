"""`linear(cat(parts, dim=-1), weight, bias)`: a projection of a concatenation, computed as written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.compat.lowerings import lower, product_in_place
from tritium.ops.op import NARROW, Arguments, Block, Draw, Op, Provider, Samples, Shape, Trial, count, octave


def reference(
    parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return F.linear(torch.cat(parts, dim=-1), weight, bias).to(out_dtype or weight.dtype)


def arguments(draw: Draw, parts: Sequence[torch.Tensor], n: int, *, bias: bool = True) -> dict[str, Any]:
    k = sum(part.shape[-1] for part in parts)
    return {"parts": [*parts], "weight": draw(n, k) / k**0.5, "bias": draw(n) if bias else None}


def draw_samples(draw: Draw) -> Samples:
    yield "awkward", arguments(draw, [draw(2, 7, 63), draw(2, 7, 100)], 1)
    # Wide in the output: the op does not define how a GEMM rounds long sums.
    yield "wide", arguments(draw, [draw(1, 7, 60), draw(1, 7, 4)], 3072, bias=False)
    yield "wider", arguments(draw, [draw(1, 7, 60), draw(1, 7, 4)], 5120)
    yield "three parts", arguments(draw, [draw(2, 1), draw(2, 60), draw(2, 7)], 100)
    yield "transposed", arguments(draw, [draw(2, 60, 7).transpose(1, 2), draw(2, 7, 63)], 7)
    yield "no rows", arguments(draw, [draw(0, 60), draw(0, 7)], 7)


_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("add_product(Tensor total, Tensor left, Tensor right) -> Tensor")
_LIBRARY.impl("add_product", torch.addmm, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::add_product", torch.addmm, lib=_LIBRARY)
_ADD_PRODUCT = torch.ops.tritium.add_product.default


def run_aten(given: Arguments) -> torch.Tensor:
    """Compute one product per part and accumulate them, without storing the concatenation."""
    weight = given.weight
    first, *others = (part.reshape(-1, part.shape[-1]) for part in given.parts)
    start = first.shape[-1]
    out = F.linear(first, weight[:, :start], given.bias)
    if compat.traced.is_traced(out):
        lower(_ADD_PRODUCT, product_in_place)
    for part in others:
        width = part.shape[-1]
        out = _ADD_PRODUCT(out, part, weight[:, start : start + width].t())
        start += width
    return out.view(*given.parts[0].shape[:-1], weight.shape[0])


def decline_aten(given: Arguments) -> str | None:
    parts, weight = given.parts, given.weight
    dtypes = {tensor.dtype for tensor in (*parts, weight, given.bias) if tensor is not None}
    if len(dtypes | {given.out_dtype or weight.dtype}) > 1:
        return "the parts, the weight and the result have different dtypes"
    if len(parts) > 4:
        return f"{len(parts)} parts would be {len(parts)} small products"
    return None


def shape(given: Arguments) -> Shape:
    parts = given.parts
    widths = "+".join(str(octave(part.shape[-1])) for part in parts)
    return {"tokens": octave(count(parts[0].shape[:-1])), "k": widths, "n": octave(given.weight.shape[0])}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    widths = map(int, str(shape["k"]).split("+"))
    return arguments(draw, [draw(1, shape["tokens"], width) for width in widths], shape["n"])


def block(shape: Any, draw: Draw) -> Block:
    """Return the end of a FLUX single block: attention concatenated with a narrow product's result.

    The product includes the activation, as `linear_gelu` computes it, so the concatenation only copies.
    """
    given = alone(shape, draw)
    first, *others = given["parts"]
    narrow = draw(1, shape["tokens"], NARROW)
    inner = [draw(part.shape[-1], NARROW) / NARROW**0.5 for part in others]

    def single_block(
        first: torch.Tensor, narrow: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *inner: torch.Tensor
    ) -> torch.Tensor:
        others = [F.linear(narrow, one) for one in inner]
        return F.linear(torch.cat([first, *others], dim=-1), weight, bias)

    return single_block, (first, narrow, given["weight"], given["bias"], *inner)


# FLUX's single blocks at 512, 1024 and 2048 pixels.
STANDARD = [(tokens, "4096+16384", 4096) for tokens in (1024, 4096, 16384)]
TRIAL = Trial.in_block(shape, alone, block, "tokens k n", STANDARD)

PROVIDER = Provider("aten", "cat_linear", run_aten, decline_aten, traced=True)
OP = Op("cat_linear", reference, draw_samples, (PROVIDER,), trial=TRIAL)
