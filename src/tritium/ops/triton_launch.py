"""Start Triton kernels: at once on tensors with storage, or as nodes of the graph that is traced.

Kernels are top-level functions under `triton.jit`, in modules that import Triton: providers import them when they run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from tritium import compat, device, envs

# The dtypes that kernels take: they compute in float32.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Triton kernels that this process has started outside of generated code, by hash.
_STARTED: dict[str, Any] = {}

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("in_memory(Tensor x, int[] order) -> Tensor")


def _copied(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    del order
    return x.clone()


_LIBRARY.impl("in_memory", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::in_memory", _copied, lib=_LIBRARY)
_IN_MEMORY = torch.ops.tritium.in_memory.default

# The op that is being traced, and the op of each kernel that was traced.
_TRACED: ContextVar[str] = ContextVar("tritium_traced_op", default="")
_OF_OP: dict[Any, str] = {}

# Launch options that are parameters of `triton.Config`. Others are passed as kernel arguments, which Inductor reads.
_OF_CONFIG = ("num_warps", "num_stages")


def decline_tensors(*tensors: torch.Tensor | None) -> str | None:
    """Return why a Triton kernel that computes in float32 cannot take these tensors, or None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not device.has_triton():
        return "triton is not installed"
    elsewhere = {tensor.device.type for tensor in given} - {"cuda"}
    if elsewhere and not envs.triton_interpreted():
        return f"Triton kernels run on a GPU, this graph runs on {', '.join(sorted(elsewhere))}"
    wide = {str(tensor.dtype) for tensor in given if tensor.dtype not in DTYPES}
    return f"the kernel computes in float32, an input is {', '.join(sorted(wide))}" if wide else None


def dynamic_width(*sizes: int | torch.SymInt) -> str | None:
    """Return why a kernel with a fixed width cannot take rows of these sizes, or None."""
    fixed = all(isinstance(size, int) for size in sizes)
    return None if fixed else "the kernel's rows have one width, this one is dynamic"


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def launch(
    kernel: Any, grid: tuple[int | torch.SymInt, ...], *arguments: Any, options: dict[str, int], **constants: Any
) -> None:
    """Start a kernel, whose first argument is a tensor. `options` are Triton's: warps, stages, registers.

    Floating-point numbers must be constants: Inductor would pass them as float64 arguments.
    """
    first = arguments[0]
    if compat.traced.is_traced(first):
        _OF_OP[kernel.fn] = _TRACED.get()
        torch.library.wrap_triton(_configured(kernel, tuple(options.items())))[grid](*arguments, **constants)
        return
    if constants.get("TMA"):
        _allow_scratch(first.device)
    is_elsewhere = first.is_cuda and first.device.index != torch.cuda.current_device()
    with torch.cuda.device(first.device) if is_elsewhere else contextlib.nullcontext():
        compiled = kernel[grid](*arguments, **constants, **options, enable_fp_fusion=True)
    # None in Triton's interpreter.
    if compiled is not None:
        _STARTED[compiled.hash] = compiled


def _allow_scratch(where: torch.device) -> None:
    """Let Triton allocate the memory of tile descriptors; generated code does so itself."""
    import triton

    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=where))


def in_memory(x: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return a contiguous or channels-last tensor; in a graph, force it to be stored once.

    Inductor would otherwise recompute a pointwise expression for every kernel that reads it.
    """
    if not compat.traced.is_traced(x):
        return x
    compat.lowerings.lower(_IN_MEMORY, compat.lowerings.stored)
    last = x.dim() - 1
    order = [last, 0, *range(last - 1, 0, -1)] if channels_last else list(range(last, -1, -1))
    return _IN_MEMORY(x, order)  # type: ignore[no-any-return]


@contextlib.contextmanager
def tracing(op: str) -> Iterator[None]:
    """Attribute the kernels that are traced in this context to an op."""
    token = _TRACED.set(op)
    try:
        yield
    finally:
        _TRACED.reset(token)


def op_of(function: Any) -> str | None:
    """Return the op of a traced kernel's function, or None for kernels of the model."""
    return _OF_OP.get(function)


def started() -> list[Any]:
    """Return the Triton kernels started outside of generated code: torch's artifacts do not include them."""
    return list(_STARTED.values())


@functools.cache
def _configured(kernel: Any, options: tuple[tuple[str, int], ...]) -> Any:
    """Return a kernel as an autotuner with one configuration, which never times anything."""
    import triton

    own = {name: value for name, value in options if name in _OF_CONFIG}
    others = {name: value for name, value in options if name not in _OF_CONFIG}
    return triton.autotune(configs=[triton.Config(others, **own)], key=[])(kernel)
