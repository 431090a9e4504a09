"""`x + gate * y` with a gate that is broadcast over tokens, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from tritium.ops.launch import cannot_launch, remembered, start
from tritium.ops.op import Op, Provider, Sample


def reference(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    narrow = _result_dtype(x, gate, y)
    wide = torch.promote_types(narrow, torch.float32)
    return (x.to(wide) + gate.to(wide) * y.to(wide)).to(out_dtype or narrow)


def fake(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, gate.shape, y.shape)
    return x.new_empty(shape, dtype=out_dtype or _result_dtype(x, gate, y))


def _result_dtype(*tensors: torch.Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


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


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    # Triton takes annotations for types of its own: only compile-time constants may have one.
    @triton.jit  # type: ignore[untyped-decorator]
    def gated_residual_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        gate_ptr,
        y_ptr,
        out_ptr,
        width,
        tokens,
        gate_batch,
        gate_token,
        gate_column,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        place = row * width + columns
        gate_row = gate_ptr + (row // tokens) * gate_batch + (row % tokens) * gate_token
        gate = tl.load(gate_row + columns * gate_column, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, (x + gate * y).to(out_ptr.dtype.element_ty), mask=inside)

    return gated_residual_kernel


def run_triton(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    import triton

    batch, tokens, width = x.shape
    strides = gate.expand(batch, tokens, width).stride()
    out = x.new_empty(x.shape, dtype=out_dtype or _result_dtype(x, gate, y))
    if out.numel() == 0:
        return out
    block = min(2048, triton.next_power_of_2(width))
    start(
        _kernel(),
        (batch * tokens, triton.cdiv(width, block)),
        x.contiguous(),
        gate,
        y.contiguous(),
        out,
        width,
        tokens,
        *strides,
        BLOCK=block,
        num_warps=max(1, block // 512),
    )
    return out


def decline_triton(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None) -> str | None:
    del out_dtype
    if x.dim() != 3 or x.shape != y.shape:
        return f"the kernel takes x and y of one shape [B, S, H], got {tuple(x.shape)} and {tuple(y.shape)}"
    return cannot_launch(x, gate, y)


OP = Op(
    name="gated_residual",
    schema="(Tensor x, Tensor gate, Tensor y, ScalarType? out_dtype) -> Tensor",
    reference=reference,
    fake=fake,
    samples=samples,
    providers=(Provider("triton", "gated_residual", remembered(run_triton), decline_triton),),
)
