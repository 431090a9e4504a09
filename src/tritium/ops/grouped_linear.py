"""`linear` of groups of rows, each with another weight: the products of routed experts.

x is [M, K] and holds the rows of weight 0, then those of weight 1, and so on; `offsets` [E] in int32 are the ends of the
groups. Each weight is [N, K]. Rows beyond the last offset are zero, or undefined without `zero_rest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat, device
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples

# The major compute capabilities with a kernel; for others PyTorch reads the offsets back to the host, and loops.
GROUPED = (9, 10)

# Rows start at multiples of this many bytes.
ALIGNED = 16


def reference(
    x: torch.Tensor, weights: list[torch.Tensor], offsets: torch.Tensor, zero_rest: bool = True
) -> torch.Tensor:
    del zero_rest
    rows = torch.arange(x.shape[0], device=x.device)
    out = x.new_zeros(x.shape[0], weights[0].shape[0])
    if x.is_meta:
        # Counts of operations run this: each row has one product.
        weights = weights[:1]
    # The products of all rows: the sizes of groups are values on the device.
    for place, weight in enumerate(weights):
        is_inside = rows < offsets[place]
        if place:
            is_inside = is_inside & (rows >= offsets[place - 1])
        out = torch.where(is_inside[:, None], F.linear(x, weight), out)
    return out


def draw_samples(draw: Draw) -> Samples:
    def sample(x: torch.Tensor, n: int, *sizes: int, stacked: bool = True) -> dict[str, object]:
        k = x.shape[1]
        stack = draw(len(sizes), n, k) / k**0.5
        weights = list(stack.unbind()) if stacked else [weight.clone() for weight in stack]
        return {"x": x, "weights": weights, "offsets": torch.tensor(sizes, device=x.device).cumsum(0).to(torch.int32)}

    yield "awkward", sample(draw(63, 100), 7, 1, 0, 62)
    yield "whole rows", sample(draw(60, 64), 128, 7, 1, 52)
    yield "weights apart", sample(draw(60, 64), 16, 53, 7, stacked=False)
    yield "rows beyond", sample(draw(100, 64), 8, 0, 60, 3)
    yield "one group", sample(draw(7, 16), 3072, 7)
    # Wide in the output: the op does not define how a GEMM rounds long sums.
    yield "wide", sample(draw(16, 16), 5120, 1, 15)
    yield "transposed", sample(draw(64, 63).t(), 16, 60, 3)
    yield "no rows", sample(draw(0, 64), 16, 0, 0)


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights as [E, N, K]: a view if they are consecutive slices of one tensor, else a copy."""
    first = weights[0]
    step = first.numel() * first.element_size()
    start = first.data_ptr()
    storage = first.untyped_storage()
    is_view = first.is_contiguous() and all(
        weight.is_contiguous()
        and weight.data_ptr() == start + place * step
        and weight.untyped_storage().data_ptr() == storage.data_ptr()
        for place, weight in enumerate(weights)
    )
    if is_view:
        return first.detach().as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(weights))


def run_grouped_mm(given: Arguments) -> torch.Tensor:
    out = compat.operators.grouped_product(given.x.contiguous(), stacked(given.weights), given.offsets)
    if given.zero_rest:
        rows = torch.arange(out.shape[0], device=out.device)
        out = torch.where(rows[:, None] < given.offsets[-1], out, 0.0)
    return out.contiguous()


def decline_grouped_mm(given: Arguments) -> str | None:
    if reason := decline_kind(given.x.device, given.x.dtype):
        return reason
    if any(weight.dtype != given.x.dtype for weight in given.weights):
        return "the rows and the weights have different dtypes"
    n, k = given.weights[0].shape
    side = ALIGNED // given.x.element_size()
    if not all(compat.traced.statically_known(size % side == 0) for size in (n, k)):
        return f"N and K must be multiples of {side}, they are {n} and {k}"
    if compat.traced.statically_known(given.x.shape[0] == 0):
        return "there are no rows"
    return None


def decline_kind(where: torch.device, dtype: torch.dtype) -> str | None:
    """Return why tensors of a dtype on a device have no grouped product, or None."""
    if where.type == "cpu":
        has_product = dtype in (torch.bfloat16, torch.float16, torch.float32)
        return None if has_product else f"PyTorch's grouped product has no {dtype} on a CPU"
    if dtype != torch.bfloat16:
        return f"PyTorch's grouped product multiplies bfloat16 on a GPU, not {dtype}"
    capability = device.capability(where)
    if where.type != "cuda" or (capability is not None and capability[0] not in GROUPED):
        return "PyTorch's grouped product needs a GPU of compute capability 9 or 10"
    return None


def results(given: Arguments) -> torch.Tensor:
    out: torch.Tensor = given.x.new_empty(given.x.shape[0], given.weights[0].shape[0])
    return out


# Called through the dispatcher: PyTorch's fakes of the product take bfloat16 alone, and weights are one tensor only in
# memory.
GROUPED_MM = Provider("grouped_mm", "grouped_linear", run_grouped_mm, decline_grouped_mm)
OP = Op("grouped_linear", reference, draw_samples, (GROUPED_MM,), results=results)
