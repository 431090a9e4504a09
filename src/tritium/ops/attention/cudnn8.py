"""The provider `cudnn8` of `attention`: cuDNN's kernel for float8, by the optional package `nvidia-cudnn-frontend`.

q, k and v have one scale each, a power of two. As in `rounded_attention`, the keys' mean is removed and heads are rotated,
by the kernel that stores heads in 8 bits. Generated code calls the op as an operator: cuDNN's graphs cannot be traced.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any, NamedTuple

import torch

from tritium import device
from tritium.compat import attention as compat_attention
from tritium.ops.attention import eight_bits
from tritium.ops.op import Arguments
from tritium.ops.quantize_rows import FP8, powers_of_two
from tritium.ops.triton_launch import decline_tensors, with_dense_rows
from tritium.ops.wide_attention import empty_result

PACKAGE = "cudnn"

# The compute capability from which cuDNN has this kernel.
HOPPER = (9, 0)

# The scale by which cuDNN rounds weights, which are at most 1, to float8: the largest number of the format.
WEIGHT_SCALE = 448.0

# How much larger a rotated row can be than its largest element, and twice of it with a mean removed: sqrt of 64.
GROWTH = 8.0

# Names of the graph's scalars: factors of stored values, of weights, and the scale of a result in float8.
SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")

_LOCK = threading.Lock()


# The sizes and strides of q, k, v and the result.
Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Graph(NamedTuple):
    """A built graph of cuDNN, its tensors by name, the bytes of its workspace, and whether its result is float8."""

    graph: Any
    tensors: dict[str, Any]
    workspace: int
    rounds: bool


def decline(given: Arguments) -> str | None:
    if not compat_attention.installed(PACKAGE):
        return "the package 'nvidia-cudnn-frontend' is not installed"
    if not given.q.is_cuda:
        return f"it runs on a GPU, the tensors are on {given.q.device.type}"
    capability = device.capability(given.q.device)
    if capability is not None and capability < HOPPER:
        return f"it needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    reason = eight_bits.decline_form(given) or eight_bits.decline_on_a_gpu(given)
    return reason or decline_tensors(given.q, given.k, given.v)


def run(given: Arguments) -> torch.Tensor:
    q, k, v = map(with_dense_rows, (given.q, given.k, given.v))
    mean = k.mean(2, dtype=torch.float32)
    values: dict[str, torch.Tensor] = {}
    for name, side, growth in (("q", q, GROWTH), ("k", k, 2 * GROWTH), ("v", v, 1.0)):
        values[name], values[f"descale_{name}"] = in_float8(side, mean if name == "k" else None, growth)
    out = empty_result(q, v)
    number = functools.partial(torch.full, (1, 1, 1, 1), device=q.device, dtype=torch.float32)
    values |= {"scale_s": number(WEIGHT_SCALE), "descale_s": number(1 / WEIGHT_SCALE), "out": out}
    # A result is a mean of values, so it fits into their scale.
    values["scale_o"] = values["descale_v"].reciprocal()
    values["amax_s"], values["amax_o"] = number(0.0), number(0.0)
    layouts = tuple((tuple(values[name].shape), tuple(values[name].stride())) for name in ("q", "k", "v", "out"))
    index = q.device.index or 0
    with _LOCK, torch.cuda.device(q.device):
        built = graph_of(layouts, out.dtype, float(given.scale), index)
        if built.rounds:
            values["out"] = torch.empty_like(out, dtype=FP8)
        handle = handle_of(index)
        package().set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
        workspace = torch.empty(max(1, built.workspace), device=q.device, dtype=torch.uint8)
        built.graph.execute({built.tensors[name]: values[name] for name in built.tensors}, workspace, handle=handle)
    return out.copy_(values["out"].to(torch.float32) * values["descale_v"]) if built.rounds else out


def in_float8(x: torch.Tensor, mean: torch.Tensor | None, growth: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [B, N, S, D] in float8 with heads first in memory, and its scale as [1, 1, 1, 1].

    The scale is for `growth` times the largest magnitude: float8 loses nothing by a scale that is some octaves too large.
    """
    batch, heads, tokens, width = x.shape
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32) * growth
    scale = powers_of_two(largest.reshape(1, 1, 1, 1))[0]
    stored = eight_bits.stored(x, mean, FP8, static=scale, rotates=growth > 1).values
    return stored.view(batch, heads, -1, width)[:, :, :tokens], scale


def package() -> Any:
    return importlib.import_module(PACKAGE)


@functools.cache
def handle_of(index: int) -> Any:
    del index
    return package().create_handle()


@functools.lru_cache(maxsize=64)
def graph_of(layouts: Layouts, dtype: torch.dtype, scale: float, index: int) -> Graph:
    """Build the graph for tensors of these sizes and strides, which takes cuDNN some milliseconds.

    Versions differ in what they take: results in 16 bits or in float8, with the largest magnitudes as results or without.
    """
    failed: Exception | None = None
    for rounds, measures in ((False, False), (False, True), (True, True), (True, False)):
        try:
            return built(layouts, None if rounds else dtype, scale, index, measures=measures)
        except Exception as error:  # noqa: BLE001 - cuDNN raises several types for graphs that it does not support
            failed = failed or error
    assert failed is not None
    raise failed


def built(layouts: Layouts, dtype: torch.dtype | None, scale: float, index: int, *, measures: bool) -> Graph:
    """Build one form of the graph; a result without a dtype is float8."""
    cudnn = package()
    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle_of(index),
    )
    tensors: dict[str, Any] = {}
    for name, (sizes, strides) in zip("qkv", layouts, strict=False):
        tensors[name] = graph.tensor(name=name, dim=list(sizes), stride=list(strides), data_type=kinds.FP8_E4M3)
    one = [1, 1, 1, 1]
    for name in SCALARS:
        tensors[name] = graph.tensor(name=name, dim=one, stride=one, data_type=kinds.FLOAT)
    inputs = {name: tensors[name] for name in ("q", "k", "v", *SCALARS)}
    out, _, *largest = graph.sdpa_fp8(**inputs, generate_stats=False, attn_scale=scale, name="attention")
    sizes, strides = layouts[3]
    kind = {torch.float16: kinds.HALF, torch.bfloat16: kinds.BFLOAT16, None: kinds.FP8_E4M3}[dtype]
    tensors["out"] = out.set_output(True).set_dim(list(sizes)).set_stride(list(strides)).set_data_type(kind)
    if measures:
        for name, tensor in zip(("amax_s", "amax_o"), largest, strict=True):
            tensors[name] = tensor.set_output(True).set_dim(one).set_stride(one).set_data_type(kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return Graph(graph, tensors, graph.get_workspace_size(), rounds=dtype is None)
