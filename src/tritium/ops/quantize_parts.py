"""Quantize the rows of a concatenation of parts, each with an activation: the input of a quantized linear.

`kinds` has a name for each part, separated by commas. All but the gated ones take one tensor of `parts`:

    plain                                          x
    heads                                          x [..., H, D], with heads and columns joined
    gelu, gelu_tanh                                gelu(x), exact or by its tanh approximation
    silu_gated, gelu_gated, gelu_tanh_gated        activation(gate) * value: two tensors

Computed in float32 (float64 for float64) and rounded once, to 8 bits. Scales, rotation and step as in `quantize_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat
from tritium.ops import quantize_rows
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples
from tritium.ops.quantize_rows import FP8, INT8, LARGEST, ROTATIONS, results_like
from tritium.ops.residual_norm_modulate import WARP_TILE
from tritium.ops.triton_launch import decline_tensors, dynamic_width, launch, with_dense_rows

GATED = "_gated"
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
KINDS = ("plain", "heads", "gelu", "gelu_tanh", *(name + GATED for name in ACTIVATIONS))

# Numbers of the activations in the kernel.
CODES = {"plain": 0, "heads": 0, "gelu_tanh": 1, "gelu": 2, "silu": 3}

# The widest row that one program of 16 warps holds in registers.
WHOLE_ROW = 32_768


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def split(parts: list[torch.Tensor], kinds: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield each part: its kind, its tensor and the value that it gates."""
    names = kinds.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"a part is {', '.join(KINDS)}; got {', '.join(unknown)}")
    needed = sum(1 + name.endswith(GATED) for name in names)
    if needed != len(parts):
        raise ValueError(f"parts {kinds!r} are {needed} tensors, got {len(parts)}")
    tensors = iter(parts)
    for name in names:
        yield name, next(tensors), next(tensors) if name.endswith(GATED) else None


def reference(
    parts: list[torch.Tensor],
    kinds: str,
    dtype: torch.dtype,
    rotate: int = 0,
    scale: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    joined = joined_parts(parts, kinds)
    return quantize_rows.reference(joined, dtype, rotate, scale, step)


def joined_parts(parts: list[torch.Tensor], kinds: str) -> torch.Tensor:
    """Return the rows before they are quantized."""
    made = []
    for kind, tensor, value in split(parts, kinds):
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if kind == "heads":
            made.append(wide.flatten(-2))
        elif kind == "plain":
            made.append(wide)
        else:
            active = activated(wide, kind.removesuffix(GATED))
            made.append(active if value is None else active * value)
    return torch.cat(made, dim=-1) if len(made) > 1 else made[0]


def draw_samples(draw: Draw) -> Samples:
    for dtype, word in ((FP8, "fp8"), (INT8, "int8")):

        def sample(*parts: torch.Tensor, kinds: str, dtype: torch.dtype = dtype, **others: Any) -> dict[str, Any]:
            return {"parts": [*parts], "kinds": kinds, "dtype": dtype, **others}

        for width in (1, 7, 63, 100, 3072, 5120):
            yield f"{word}, rows of {width}", sample(draw(2, 3, width), kinds="plain")
        for activation in ("gelu", "gelu_tanh"):
            yield f"{word}, {activation}", sample(3 * draw(2, 7, 100), kinds=activation)
        for activation in ACTIVATIONS:
            gate, value = draw(3, 7, 126).chunk(2, -1)
            yield f"{word}, gated {activation}", sample(gate, value, kinds=activation + GATED)
        yield f"{word}, a FLUX single block", sample(draw(2, 7, 48), draw(2, 7, 192), kinds="plain,gelu_tanh")
        yield f"{word}, awkward parts", sample(draw(2, 7, 63), draw(2, 7, 100), kinds="gelu,plain")
        heads = draw(2, 3, 7, 20).transpose(1, 2)
        yield f"{word}, heads", sample(heads, kinds="heads")
        yield f"{word}, heads and a gate", sample(heads, draw(2, 7, 9), draw(2, 7, 9), kinds="heads,silu_gated")
        yield f"{word}, tokens of a longer sequence", sample(draw(2, 12, 64)[:, 5:], kinds="plain")
        yield f"{word}, transposed", sample(draw(2, 60, 7).transpose(1, 2), kinds="gelu_tanh")
        yield f"{word}, one row", sample(draw(100), kinds="plain")
        yield f"{word}, no rows", sample(draw(0, 60), kinds="gelu")
        static, step = draw(3, dtype=torch.float32).fill_(2**-5), draw(1).fill_(1).long().reshape(())
        yield f"{word}, static", sample(draw(7, 100), kinds="gelu_tanh", rotate=0, scale=static[:1])
        yield f"{word}, by step", sample(draw(7, 100), kinds="gelu_tanh", rotate=0, scale=static, step=step)
    for group in ROTATIONS[1:]:
        yield f"int8, rotated by {group}", sample(draw(7, 256), draw(7, 512), kinds="plain,gelu", rotate=group)


def results(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    widths, shape = 0, None
    for kind, tensor, _ in split(given.parts, given.kinds):
        shape = tensor.shape[:-2] if kind == "heads" else tensor.shape[:-1]
        widths += _width(kind, tensor)
    return results_like(torch.Size((*(shape or ()), widths)), given.dtype, given.parts[0].device)


def _width(kind: str, tensor: torch.Tensor) -> int:
    return tensor.shape[-1] * tensor.shape[-2] if kind == "heads" else tensor.shape[-1]


def _head(kind: str, tensor: torch.Tensor) -> int:
    """Return the adjacent columns of a part: those of a head, or all."""
    return tensor.shape[-1] if kind == "heads" else _width(kind, tensor)


def with_strides(kind: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return a part and its strides as [B, S, heads]; without heads their stride is 0.

    Strides instead of a view: that would cost the host a microsecond in each call of the generated code.
    """
    tensor = with_dense_rows(tensor)
    inner = 2 if kind == "heads" else 1
    if tensor.dim() - inner > 2:
        tensor = tensor.flatten(0, tensor.dim() - inner - 2)
    *outer, _ = tensor.stride()
    rows, heads = (outer[:-1], outer[-1]) if kind == "heads" else (outer, 0)
    return tensor, (*[0] * (2 - len(rows)), *rows, heads)


def run_triton(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from tritium.ops.kernels.quantize_parts import quantize_parts_kernel

    q, scale = results(given)
    if compat.traced.statically_known(q.numel() == 0):
        return q, scale
    *before, (kind, tensor, value) = split(given.parts, given.kinds)
    last, last_strides = with_strides(kind, tensor)
    none: tuple[None, tuple[int, ...]] = None, (0, 0, 0)
    gated, gated_strides = none if value is None else with_strides("plain", value)
    first, first_strides = with_strides(*before[0][:2]) if before else none
    widths = [_width(kind, tensor) for kind, tensor, _ in (*before, (kind, tensor, value))]
    tokens = last.shape[-3 if kind == "heads" else -2] if scale.dim() > 1 else 1
    cut, options = launch_options(*widths)
    launch(
        quantize_parts_kernel,
        (-(-scale.numel() // cut["ROWS"]),),
        last,
        first,
        gated,
        given.scale,
        given.step,
        q,
        scale,
        scale.numel(),
        tokens,
        *first_strides,
        *last_strides,
        *gated_strides[:2],
        FIRST_WIDTH=widths[0] if before else 0,
        FIRST_HEAD=_head(*before[0][:2]) if before else 0,
        FIRST_ACTIVATION=CODES[before[0][0]] if before else 0,
        LAST_WIDTH=widths[-1],
        LAST_HEAD=_head(kind, tensor),
        LAST_ACTIVATION=CODES[kind.removesuffix(GATED)],
        LAST=0 if given.scale is None else given.scale.numel() - 1,
        STEPS=ROTATIONS.index(given.rotate),
        FLOAT=given.dtype == FP8,
        LARGEST=LARGEST[given.dtype],
        options=options,
        **cut,
    )
    return q, scale


def launch_options(*widths: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiling of rows of parts of these widths, and Triton's options.

    A program holds whole rows in registers, at most 64 values a thread, as tuples of tiles that end with a part. A tile is
    one 16-byte access per thread in bfloat16 where the widths are multiples of it, else half of it.

    >>> launch_options(3072), launch_options(3072, 12288)
    (({'ROWS': 1, 'TILE': 1024}, {'num_warps': 4}), ({'ROWS': 1, 'TILE': 1024}, {'num_warps': 8}))
    """
    width = sum(widths)
    # Narrow rows as in `residual_norm_modulate`; 8 warps hold 16,384 columns.
    warps = next((warps for warps in (1, 2, 4) if width <= 5 * warps * WARP_TILE), 8 if width <= 64 * WARP_TILE else 16)
    tile = warps * WARP_TILE
    while tile > 1024 and any(width % tile for width in widths):
        tile //= 2
    while tile // 2 >= max(*widths, 256):
        tile //= 2
    return {"ROWS": max(1, 4 * WARP_TILE // tile) if width <= tile else 1, "TILE": tile}, {"num_warps": max(4, warps)}


def decline_triton(given: Arguments) -> str | None:
    if given.dtype not in LARGEST or given.rotate not in ROTATIONS:
        return "the reference raises for these arguments"
    kinds = given.kinds.split(",")
    if len(kinds) > 2 or (kinds[0].endswith(GATED) and len(kinds) > 1):
        return "the kernel takes one part, or two of which the second may be gated"
    widths = [_width(kind, tensor) for kind, tensor, _ in split(given.parts, given.kinds)]
    if reason := dynamic_width(*widths) or decline_tensors(*given.parts, given.scale):
        return reason
    if sum(widths) > WHOLE_ROW:
        return f"the kernel holds rows of up to {WHOLE_ROW} columns, these have {sum(widths)}"
    if given.rotate and any(width % given.rotate for width in widths):
        return f"the parts have {' and '.join(map(str, widths))} columns, no multiples of {given.rotate}"
    return quantize_rows.decline_static(given.scale, given.step)


# Inductor fuses the reference into one kernel that reads a row once for the scale and once for the values.
PROVIDER = Provider("triton", "quantize_parts", run_triton, decline_triton, traced=True)
OP = Op("quantize_parts", reference, draw_samples, (PROVIDER,), results=results, default="triton")
