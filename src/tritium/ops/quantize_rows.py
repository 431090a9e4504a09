"""Quantize the rows of a tensor to 8 bits: `q` and a float32 scale per row, with `x` close to `q * scale`.

float8_e4m3fn: the scale is the smallest power of two with which the row fits into +-448, computed from the bits of the
row's largest magnitude. Scaling is then exact, so all providers return the same bits. Powers of two lose no accuracy: the
format has 3 mantissa bits for every magnitude.

int8: the scale is the row's largest magnitude divided by 127; values are rounded half to even.

`rotate` multiplies every group of that many columns by a regular Hadamard matrix before quantizing. The rotation spreads
an outlier over its group, which int8 needs and float8 does not. Products are unchanged if the weight is rotated as well.

With a static `scale`, one float32 number for the whole tensor, no largest magnitude is computed, and values beyond its
range are clamped. With a `step`, an integer on the device, `scale` has one number per step, and `scale[step]` is used; a
step past the last one uses the last. The step is read when the kernel runs: a replayed graph follows it.

The result has NaN where x has NaN: in `q` for float8, in the scale for int8. Static int8 has no place for NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from tritium import compat
from tritium.ops import rms_norm
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples
from tritium.ops.triton_launch import decline_tensors, dynamic_width, launch, with_dense_rows

FP8, INT8 = torch.float8_e4m3fn, torch.int8

# The largest magnitude that is stored. int8 leaves -128 out: the range is symmetric.
LARGEST = {FP8: 448.0, INT8: 127.0}

# The sizes of a regular Hadamard matrix that are built as Kronecker powers of the one of size 4; 0 rotates nothing.
ROTATIONS = (0, 4, 16, 64, 256)

# Bits of float32: the exponent, one step of it, and the largest mantissa of 448 = 1.75 * 2^8.
EXPONENT = 0x7F800000
ONE_EXPONENT = 1 << 23
BELOW_QUARTER = ONE_EXPONENT // 4 - 1

# The exponent of 2^8.
OCTAVES = 8

# The smallest normal float32 number: rows of zeros get this scale, whose reciprocal is finite.
TINY = torch.finfo(torch.float32).tiny


def rotation(group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the regular Hadamard matrix of a size, symmetric and its own inverse.

    Its rows have equal sums, so a mean that is not zero spreads over the group too. In Sylvester's matrix it would all go
    to the first column.
    """
    step = torch.full((4, 4), 0.5, dtype=dtype, device=device) - torch.eye(4, dtype=dtype, device=device)
    matrix = step
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, step)
    return matrix


def rotated(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return x with every group of columns rotated; rotating twice returns x, and 0 rotates nothing.

    A product with a constant matrix: Inductor has one product and one kernel after it, for any group. It compiles the
    butterfly `sum / 2 - x` to a kernel per factor of 4, each through memory, and on a CPU to strided reads.
    """
    check_rotation(x, group)
    if not group:
        return x
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return (groups @ rotation(group, x.dtype, x.device)).reshape(x.shape)


def check_rotation(x: torch.Tensor, group: int) -> None:
    if group not in ROTATIONS:
        raise ValueError(f"a rotation has a group of {', '.join(map(str, ROTATIONS[1:]))} columns, or 0; got {group}")
    if x.dim() == 0 or (group and x.shape[-1] % group):
        raise ValueError(f"groups of {group} columns do not divide a tensor of shape {tuple(x.shape)}")


def reference(
    x: torch.Tensor,
    dtype: torch.dtype,
    rotate: int = 0,
    scale: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype not in LARGEST:
        raise ValueError(f"rows are quantized to {' or '.join(map(str, LARGEST))}, not to {dtype}")
    static = static_scale(scale, step)
    wide = rotated(x.to(torch.promote_types(x.dtype, torch.float32)), rotate)
    if static is not None:
        scale = static.expand(*x.shape[:-1], 1).contiguous()
        inverse = scale.reciprocal()
    else:
        largest = wide.abs().amax(-1, keepdim=True).to(torch.float32)
        scale, inverse = powers_of_two(largest) if dtype == FP8 else int8_scales(largest)
    scaled = wide * inverse
    if dtype == INT8:
        scaled = scaled.round()
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


def static_scale(scale: torch.Tensor | None, step: torch.Tensor | None) -> torch.Tensor | None:
    """Return the static scale of a call as one float32 number, or None if every row has its own."""
    if scale is None:
        if step is not None:
            raise ValueError("a step selects one of several static scales, and none are given")
        return None
    if step is None:
        if scale.numel() != 1:
            raise ValueError(f"a static scale is one number for the whole tensor, got shape {tuple(scale.shape)}")
        return scale.to(torch.float32).reshape(())
    if scale.dim() != 1 or step.numel() != 1 or step.is_floating_point():
        raise ValueError(
            f"static scales of steps are a vector, and the step is one integer; got shapes {tuple(scale.shape)} and "
            f"{tuple(step.shape)}, {step.dtype}"
        )
    chosen = step.to(torch.int64).reshape(1).clamp(0, scale.shape[0] - 1)
    return scale.to(torch.float32).index_select(0, chosen).reshape(())


def powers_of_two(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest power of two 2^e with `largest / 2^e <= 448`, and its reciprocal, both exact.

    Infinity and NaN, whose bits differ between devices, have the scale of the largest numbers.
    """
    # The lower bound keeps the scale a normal number: GPUs may flush others to zero.
    bits = largest.view(torch.int32).clamp((OCTAVES + 1) * ONE_EXPONENT, EXPONENT)
    # 448 has the mantissa 1.75: a larger one carries into the exponent.
    bits = ((bits + BELOW_QUARTER) & EXPONENT) - OCTAVES * ONE_EXPONENT
    # 127 is the exponent of 1.
    return bits.view(torch.float32), (2 * 127 * ONE_EXPONENT - bits).view(torch.float32)


def int8_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (largest * (1 / LARGEST[INT8])).clamp(min=TINY)
    return scale, scale.reciprocal()


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype, rotate: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [N, K] of a linear layer in 8 bits, and its scales [N, 1]."""
    if weight.dim() != 2:
        raise ValueError(f"the weight of a linear layer has two dimensions, got shape {tuple(weight.shape)}")
    return reference(weight, dtype, rotate)


def draw_samples(draw: Draw) -> Samples:
    def zeros_first(x: torch.Tensor) -> torch.Tensor:
        x[0] = 0
        return x

    for dtype, word in ((FP8, "fp8"), (INT8, "int8")):
        for width in (1, 7, 63, 100, 3072, 5120):
            yield f"{word}, rows of {width}", {"x": draw(3, width), "dtype": dtype}
        yield f"{word}, tokens of a longer sequence", {"x": draw(2, 12, 64)[:, 5:], "dtype": dtype}
        yield f"{word}, transposed", {"x": draw(2, 60, 7).transpose(1, 2), "dtype": dtype}
        yield f"{word}, a row of zeros", {"x": zeros_first(draw(3, 63)), "dtype": dtype}
        yield f"{word}, one row", {"x": draw(100), "dtype": dtype}
        yield f"{word}, no rows", {"x": draw(0, 60), "dtype": dtype}
        static = draw(1, dtype=torch.float32).fill_(2**-6)
        yield f"{word}, static", {"x": draw(2, 7, 100), "dtype": dtype, "rotate": 0, "scale": static}
        of_steps, step = draw(3, dtype=torch.float32).fill_(2**-5), draw(1).fill_(2).long().reshape(())
        of_steps[2] = 2**-6
        yield (
            f"{word}, a step of three",
            {"x": draw(7, 63), "dtype": dtype, "rotate": 0, "scale": of_steps, "step": step},
        )
    for group, width in ((4, 60), (16, 3072), (64, 128), (256, 512)):
        yield f"int8, rotated by {group}", {"x": draw(2, 7, width), "dtype": INT8, "rotate": group}
    yield "fp8, rotated", {"x": draw(7, 64), "dtype": FP8, "rotate": 16}
    yield "int8, static and rotated", {"x": draw(7, 64), "dtype": INT8, "rotate": 64, "scale": static[0]}


def results(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return results_like(given.x.shape, given.dtype, given.x.device)


def results_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the 8-bit values of a shape and the scales of its rows."""
    q = torch.empty(shape, dtype=dtype, device=device)
    return q, torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)


def run_inlined(given: Arguments) -> Any:
    if compat.traced.statically_known(given.x.numel() == 0):
        return results(given)
    return tuple(part.contiguous() for part in reference(**vars(given)))


def decline_inlined(given: Arguments) -> str | None:
    del given
    return None


def run_triton(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from tritium.ops.kernels.quantize_rows import quantize_rows_kernel

    q, scale = results(given)
    if compat.traced.statically_known(q.numel() == 0):
        return q, scale
    width = given.x.shape[-1]
    rows = with_dense_rows(given.x.reshape(-1, width))
    cut, options = launch_options(width, given.rotate)
    launch(
        quantize_rows_kernel,
        (-(-rows.shape[0] // cut["ROWS"]),),
        rows,
        given.scale,
        given.step,
        q,
        scale,
        rows.shape[0],
        rows.stride(0),
        LAST=0 if given.scale is None else given.scale.numel() - 1,
        STEPS=ROTATIONS.index(given.rotate),
        FLOAT=given.dtype == FP8,
        LARGEST=LARGEST[given.dtype],
        WIDTH=width,
        options=options,
        **cut,
    )
    return q, scale


def launch_options(width: int, group: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiling of rows of a width, which hold whole groups, and Triton's options."""
    cut, options = rms_norm.launch_options(max(width, group, 16))
    return {name: cut[name] for name in ("ROWS", "BLOCK")}, options


def decline_triton(given: Arguments) -> str | None:
    if given.dtype not in LARGEST or given.rotate not in ROTATIONS or given.x.dim() == 0:
        return "the reference raises for these arguments"
    width = given.x.shape[-1]
    if reason := dynamic_width(width) or decline_tensors(given.x, given.scale):
        return reason
    if width > rms_norm.WHOLE_ROW or (given.rotate and width % given.rotate):
        return f"the kernel holds whole rows of up to {rms_norm.WHOLE_ROW} columns, in whole groups"
    return decline_static(given.scale, given.step)


def decline_static(scale: torch.Tensor | None, step: torch.Tensor | None) -> str | None:
    """Return why a kernel cannot take a static scale, or None."""
    if scale is not None and scale.dtype != torch.float32:
        return f"the kernel takes a static scale in float32, not in {scale.dtype}"
    if step is not None and step.dtype not in (torch.int32, torch.int64):
        return f"the kernel takes a step in int32 or int64, not in {step.dtype}"
    return None


# Inductor fuses the reference into the kernel that computes x: norm and modulation, or GELU.
PROVIDER = Provider("inlined", "quantize_rows", run_inlined, decline_inlined, inlined=True)
TRITON = Provider("triton", "quantize_rows", run_triton, decline_triton, traced=True)
OP = Op("quantize_rows", reference, draw_samples, (PROVIDER, TRITON), results=results)
