"""`activation((q * scale) @ (weight * weight_scale).T + bias)` of 8-bit rows and an 8-bit weight, rounded once.

q is [..., K] and weight [N, K], both int8 or both float8_e4m3fn; scale is [..., 1] and weight_scale [N, 1], in float32.
The product is scaled after it is summed: in float32, or exactly in int32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat, device
from tritium.ops.op import Arguments, Draw, Op, Provider, Samples, present
from tritium.ops.quantize_rows import FP8, INT8
from tritium.ops.quantize_rows import reference as quantize
from tritium.ops.triton_launch import DTYPES, contiguous, decline_tensors, dynamic_width, launch, with_dense_rows

ACTIVATIONS = ("none", "gelu_tanh")

# cuBLAS multiplies float8 matrices with sides that are multiples of this, and int8 matrices of the second.
FP8_SIDE, INT8_SIDE = 16, 8

# cuBLAS multiplies more int8 rows than this.
INT8_ROWS = 16

# Scales per row need a Hopper GPU; older ones have a scale per tensor.
ROW_SCALES = (9, 0)

# The hardware copies tiles (TMA) from here on.
TMA_COPIES = (9, 0)

# Tensor cores multiply float8 from here on.
FP8_CORES = (8, 9)

# Tiles of the Triton kernel, from large to small: rows, columns, warps, stages.
TILES = ((128, 256, 8, 4), (128, 128, 8, 4), (64, 128, 4, 5), (64, 64, 4, 5))

# The multiprocessors of an H200, and the tiles that keep it busy enough.
MULTIPROCESSORS, BUSY = 132, 88

# CUDA 12.9 has no float8 product with fast sums for this many rows or fewer if K is large (pytorch/ao#4582).
SLOW_SUMS = ("12.9", 256)


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str = "none",
) -> torch.Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    if q.dtype != weight.dtype:
        raise ValueError(f"rows and weight have different dtypes: {q.dtype} and {weight.dtype}")
    wide = torch.promote_types(out_dtype, torch.float32)
    product = F.linear(q.to(wide), weight.to(wide))
    return epilogue(product, scale, weight_scale, bias, out_dtype, activation)


def epilogue(
    product: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """Apply scales, bias and activation to the product of 8-bit matrices [..., N]."""
    wide = torch.promote_types(out_dtype, torch.float32)
    out = product.to(wide) * scale * weight_scale.reshape(-1)
    if bias is not None:
        out = out + bias
    if activation == "gelu_tanh":
        out = F.gelu(out, approximate="tanh")
    return out.to(out_dtype)


def arguments(draw: Draw, x: torch.Tensor, n: int, dtype: torch.dtype, **others: Any) -> dict[str, Any]:
    """Return the arguments of a linear layer on x that is quantized, and has a bias unless `others` says otherwise."""
    q, scale = (part.contiguous() for part in quantize(x, dtype))
    weight, weight_scale = quantize(draw(n, x.shape[-1]) / x.shape[-1] ** 0.5, dtype)
    sides = {"q": q, "scale": scale, "weight": weight, "weight_scale": weight_scale}
    return {**sides, "bias": draw(n), "out_dtype": x.dtype, "activation": "none", **others}


def draw_samples(draw: Draw) -> Samples:
    for dtype, word in ((INT8, "int8"), (FP8, "fp8")):
        yield f"{word}, awkward", arguments(draw, draw(2, 7, 63), 100, dtype)
        yield f"{word}, GELU", arguments(draw, draw(63, 100), 7, dtype, activation="gelu_tanh")
        yield f"{word}, one row", arguments(draw, draw(60), 1, dtype)
        yield f"{word}, one column", arguments(draw, draw(7, 1), 60, dtype, bias=None)
        yield f"{word}, whole tiles", arguments(draw, draw(1, 128, 64), 128, dtype)
        # Wide in the output: the op does not define how a GEMM rounds long sums.
        yield f"{word}, wide", arguments(draw, draw(1, 16), 3072, dtype)
        yield f"{word}, wider", arguments(draw, draw(17, 32), 5120, dtype, bias=None, activation="gelu_tanh")
        yield f"{word}, no rows", arguments(draw, draw(0, 64), 16, dtype)
        whole = arguments(draw, draw(2, 14, 64), 16, dtype)
        yield f"{word}, every second row", {**whole, "q": whole["q"][:, ::2], "scale": whole["scale"][:, ::2]}
        yield f"{word}, float32", arguments(draw, draw(18, 64), 32, dtype, out_dtype=torch.float32)


def as_rows(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q as contiguous [M, K] and its scales as contiguous [M, 1]."""
    return given.q.reshape(-1, given.q.shape[-1]).contiguous(), given.scale.reshape(-1, 1).contiguous()


def shaped(given: Arguments, rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(*given.q.shape[:-1], given.weight.shape[0])


def results(given: Arguments) -> torch.Tensor:
    shape = (*given.q.shape[:-1], given.weight.shape[0])
    return torch.empty(shape, dtype=given.out_dtype, device=given.q.device)


def run_scaled_mm(given: Arguments) -> torch.Tensor:
    """Call cuBLAS, which applies scales and bias to the sums; Inductor generates the activation."""
    rows, scale = as_rows(given)
    if compat.traced.statically_known(rows.shape[0] == 0):
        return results(given)
    version, at_most = SLOW_SUMS
    fast = device.cuda_version() != version or compat.traced.statically_known(rows.shape[0] > at_most)
    bias = None if given.bias is None else given.bias.to(given.out_dtype)
    weight, weight_scale = given.weight.contiguous(), given.weight_scale.contiguous()
    out = compat.operators.scaled_product(rows, weight, scale, weight_scale, bias, given.out_dtype, fast=fast)
    if given.activation == "gelu_tanh":
        out = F.gelu(out, approximate="tanh")
    return shaped(given, out)


def decline_scaled_mm(given: Arguments) -> str | None:
    where = given.q.device
    if given.q.dtype != FP8:
        return f"it multiplies {FP8}, not {given.q.dtype}"
    if where.type != "cuda":
        return f"float8 products are emulated on {where.type}, which is slower than float32"
    if (capability := device.capability(where)) is not None and capability < ROW_SCALES:
        return "float8 products with a scale per row need compute capability 9.0, this GPU has {}.{}".format(
            *capability
        )
    return decline_sums_of_scaled_mm(given)


def decline_sums_of_scaled_mm(given: Arguments) -> str | None:
    """Return why no GPU takes these arguments, or None."""
    if given.out_dtype not in (torch.bfloat16, torch.float16):
        return f"the product with a scale per row writes bfloat16 or float16, not {given.out_dtype}"
    return decline_sides(given, FP8_SIDE)


def decline_sides(given: Arguments, side: int) -> str | None:
    columns, rows = given.q.shape[-1], given.weight.shape[0]
    if all(compat.traced.statically_known(size % side == 0) for size in (columns, rows)):
        return None
    return f"K and N must be multiples of {side}, they are {columns} and {rows}"


def run_int_mm(given: Arguments) -> torch.Tensor:
    """Multiply to int32; Inductor generates the rest."""
    rows, scale = as_rows(given)
    if compat.traced.statically_known(rows.shape[0] == 0):
        return results(given)
    product = compat.operators.int8_product(rows, given.weight.contiguous())
    out = epilogue(product, scale, given.weight_scale, given.bias, given.out_dtype, given.activation)
    return shaped(given, out)


def decline_int_mm(given: Arguments) -> str | None:
    where = given.q.device.type
    if given.q.dtype != INT8:
        return f"it multiplies {INT8}, not {given.q.dtype}"
    if where == "cpu":
        if compat.traced.statically_known(given.q.shape[-1] < 2):
            return "the product of PyTorch on a CPU is wrong for K = 1"
        exact = compat.operators.int8_products_are_exact()
        return None if exact else "int8 products of this CPU saturate silently: it has no VNNI instructions"
    if where != "cuda":
        return f"PyTorch multiplies int8 on a CPU or with CUDA, this graph runs on {where}"
    rows = given.q.shape[:-1].numel()
    if not compat.traced.statically_known(rows > INT8_ROWS):
        return f"cuBLAS multiplies more than {INT8_ROWS} rows of int8, this call has {rows}"
    return decline_sides(given, INT8_SIDE)


def run_triton(given: Arguments) -> torch.Tensor:
    from tritium.ops.kernels.scaled_linear import scaled_linear_kernel

    out = results(given)
    if compat.traced.statically_known(out.numel() == 0):
        return out
    rows = with_dense_rows(given.q.reshape(-1, given.q.shape[-1]))
    weight, scale = with_dense_rows(given.weight), given.scale.contiguous()
    n, k = weight.shape
    cut, options = launch_options(present(rows.shape[0]), n, aligned=is_aligned(rows, weight))
    tiles = -(-rows.shape[0] // cut["BLOCK_M"]) * -(-n // cut["BLOCK_N"])
    launch(
        scaled_linear_kernel,
        (cut["PROGRAMS"] or tiles,),
        rows,
        scale,
        weight,
        given.weight_scale.contiguous(),
        contiguous(given.bias),
        out,
        rows.shape[0],
        rows.stride(0),
        weight.stride(0),
        N=n,
        K=k,
        GELU=given.activation == "gelu_tanh",
        options=options,
        **cut,
    )
    return out


def launch_options(rows: int, columns: int, *, aligned: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tiles of a product of some rows and columns, and Triton's options; `aligned` as for TMA.

    Two programs on each multiprocessor of an H200 hide the end of one tile behind the products of another: 1.55 to 1.85
    times the speed of bfloat16 in cuBLAS, where one program with tiles of twice the size reaches 1.4. Fewer tiles than that
    are computed by a program each.

    >>> launch_options(4608, 12288, aligned=True)[0]["PROGRAMS"], launch_options(77, 3072, aligned=True)[0]["BLOCK_M"]
    (264, 64)
    """
    tiles = -(-rows // 128) * -(-columns // 128)
    if aligned and tiles >= 2 * MULTIPROCESSORS:
        return options_of(128, 128, 128, 4, 3, 8, 2 * MULTIPROCESSORS, tma=True)
    # The largest tile that gives most multiprocessors work reads least per multiplication.
    fitting = (tile for tile in TILES if tile[0] < 2 * rows and -(-rows // tile[0]) * -(-columns // tile[1]) >= BUSY)
    block_m, block_n, warps, stages = next(fitting, TILES[-1])
    return options_of(block_m, block_n, 128, warps, stages)


def is_aligned(*matrices: torch.Tensor) -> bool:
    """Return True if all rows of some 8-bit matrices start at multiples of 16 bytes, on a GPU that has TMA."""
    capability = device.capability(matrices[0].device)
    return (capability is None or capability >= TMA_COPIES) and all(
        compat.traced.statically_known(size % 16 == 0)
        for matrix in matrices
        for size in (matrix.stride(0), matrix.shape[1], matrix.storage_offset())
    )


def options_of(
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    group: int = 8,
    programs: int = 0,
    tma: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants of the kernel and Triton's options.

    With `programs`, that many compute several tiles each. With `tma`, the hardware copies tiles: rows then start at
    multiples of 16 bytes.
    """
    tile = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP": group,
        "PROGRAMS": programs,
        "TMA": tma,
    }
    return tile, {"num_warps": warps, "num_stages": stages}


# What `benchmarks/quantize_session.py` compares: tiles, bytes of K, warps, stages, group, programs, TMA.
CANDIDATES = (
    (128, 128, 128, 4, 3, 8, 2 * MULTIPROCESSORS, True),
    (128, 128, 128, 4, 3, 4, 2 * MULTIPROCESSORS, True),
    (128, 128, 128, 4, 3, 16, 2 * MULTIPROCESSORS, True),
    (128, 128, 128, 4, 2, 8, 2 * MULTIPROCESSORS, True),
    (128, 128, 64, 4, 5, 8, 2 * MULTIPROCESSORS, True),
    (128, 128, 128, 4, 3, 8, 0, True),
    (64, 256, 128, 4, 2, 8, 2 * MULTIPROCESSORS, True),
    (256, 64, 128, 4, 2, 8, 2 * MULTIPROCESSORS, True),
    (64, 128, 128, 4, 4, 8, 2 * MULTIPROCESSORS, True),
    (64, 128, 128, 4, 4, 8, 0, True),
    (128, 128, 128, 8, 4, 8, 0),
    (64, 128, 128, 4, 5, 8, 0),
)


def decline_triton(given: Arguments) -> str | None:
    if given.q.dtype not in (INT8, FP8) or given.q.dtype != given.weight.dtype:
        return f"the kernel multiplies int8 or float8_e4m3fn, got {given.q.dtype} and {given.weight.dtype}"
    if given.out_dtype not in DTYPES:
        return f"the kernel computes in float32 and cannot write {given.out_dtype}"
    if given.activation not in ACTIVATIONS:
        return f"the kernel knows the activations {', '.join(ACTIVATIONS)}, not {given.activation!r}"
    if reason := decline_tensors(given.scale, given.weight_scale, given.bias):
        return reason
    if given.q.dtype == FP8 and given.out_dtype == torch.float32:
        # On an H200 the error was 100 times what float32 allows.
        return "tensor cores keep about 14 bits of sums of float8, float32 has 24"
    capability = device.capability(given.q.device) if given.q.dtype == FP8 else None
    if capability is not None and capability < FP8_CORES:
        return "float8 products need compute capability 8.9, this GPU has {}.{}".format(*capability)
    return dynamic_width(*given.weight.shape)


SCALED_MM = Provider("scaled_mm", "scaled_linear", run_scaled_mm, decline_scaled_mm, traced=True)
INT_MM = Provider("int_mm", "scaled_linear", run_int_mm, decline_int_mm, traced=True)
TRITON = Provider("triton", "scaled_linear", run_triton, decline_triton, traced=True)
# Without a verdict the first one that takes a call is used. On a GPU `int_mm` writes sums of 32 bits, and reads them again.
OP = Op("scaled_linear", reference, draw_samples, (SCALED_MM, TRITON, INT_MM), results=results)
