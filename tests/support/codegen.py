"""Generate code and stop: Triton for a GPU that need not be there, or C++; nothing is compiled.

Functions are traced on the CPU. For a GPU, the graph's tensors are moved there just before Inductor lowers it: they have no
storage, so there need not be one. What Inductor asks the driver about is answered as an H200 would.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, scheduler
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensor
from torch.utils import _triton
from torch.utils._pytree import tree_map

from tritium import compat
from tritium import device as device_module
from tritium.ops import triton_launch
from tritium.ops.op import NAMESPACE
from tritium.report import kernel_dump
from tritium.report.observer import KernelObserver

H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=140 << 30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    L2_cache_size=60 << 20,
    gcnArchName="",
)


class _Driver:
    """What torch and Triton ask of a GPU's driver to analyse kernels; nothing is launched by it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., float]:
        raise AssertionError("a kernel with one configuration was to be timed")


@contextlib.contextmanager
def pretended_driver() -> Iterator[None]:
    """Let Triton kernels be traced into graphs without a GPU."""
    if not device_module.has_triton():
        yield
        return
    from triton.runtime import driver

    with mock.patch.object(driver, "_active", _Driver()):
        yield


class _Called(Exception):
    """Generated code was to run."""


# The code that calls the kernels, one text for each graph that was generated last.
WRAPPERS: list[str] = []


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            replace(owner, "get_device_properties", staticmethod(lambda *_, **__: H200))
        replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        replace(torch.cuda, "current_device", lambda: 0)
        replace(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90))
        replace(CudaInterface, "current_device", staticmethod(lambda: 0))
        replace(CudaInterface, "is_available", staticmethod(lambda: True))
        replace(CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True))
        replace(CudaInterface, "raise_if_triton_unavailable", staticmethod(lambda *_: None))
        replace(_triton, "triton_hash_with_backend", lambda *_, **__: "none")
        replace(scheduler, "has_triton", lambda: True)
        yield


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def _move(gm: fx.GraphModule) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(lambda value: gpu if value == cpu else value, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(_on_gpu, node.meta["val"])


def generated(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    device: str = "cuda",
    dynamic: dict[int, Sequence[int]] | None = None,
    rewrite: Callable[[fx.Graph], None] | None = None,
    **settings: Any,
) -> KernelObserver:
    """Generate the code of a function; `dynamic` are the dims of inputs, by their place, of no fixed size.

    `rewrite` changes Dynamo's graph before Inductor gets it.
    """
    observer = KernelObserver(device, NAMESPACE, triton_launch.op_of)
    WRAPPERS[:] = generations(
        function, [inputs], dynamic or {}, device=device, observer=observer, rewrite=rewrite, **settings
    )
    assert observer.saw_codegen
    return observer


def launches(observer: KernelObserver) -> list[str]:
    """The kernels that were generated, one entry for each launch."""
    return [kernel.name for kernel in observer.kernels if kernel.kind == "generated"]


def generations(
    function: Callable[..., Any],
    calls: Sequence[Sequence[torch.Tensor]],
    dynamic: dict[int, Sequence[int]],
    given_to: list[list[Any]] | None = None,
    *,
    device: str = "cuda",
    observer: KernelObserver | None = None,
    rewrite: Callable[[fx.Graph], None] | None = None,
    **settings: Any,
) -> list[str]:
    """Return the code that several calls in a row generate, one text for each time that it is generated.

    `given_to` gets the arguments that each call passes to the code.
    """
    texts: list[str] = []
    torch._dynamo.reset()

    def keep(lowering: GraphLowering) -> Any:
        code, *_ = lowering.codegen()
        texts.append(getattr(code, "value", str(code)))

        def call(arguments: list[Any]) -> Any:
            if given_to is not None:
                given_to.append(list(arguments))
            raise _Called

        return types.SimpleNamespace(call=call, __file__=__file__, runner=None)

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if observer is not None:
                stack.enter_context(compat.observation.observed_codegen(observer))
            if device == "cuda":
                stack.enter_context(_pretended_gpu())
                _move(gm)
                example_inputs = [_on_gpu(value) for value in example_inputs]
            return compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if rewrite is not None:
            rewrite(gm.graph)
            gm.recompile()
        return compile_fx.compile_fx(gm, example_inputs, inner_compile=inner)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    quiet = inductor.patch({"fx_graph_cache": False, "compile_threads": 1, **settings})
    kept = mock.patch.object(GraphLowering, "compile_to_module", keep)
    with quiet, kept, pretended_driver(), torch.inference_mode():
        for given in calls:
            marks = [(given[index], dim) for index, dims in dynamic.items() for dim in dims]
            with compat.dynamo.marked_dynamic(marks), contextlib.suppress(_Called):
                compiled(*given)
    return texts


def owned_calls() -> list[str]:
    """The lines of the code generated last that call an operator of the package through PyTorch's dispatcher."""
    lines = (line.strip() for text in WRAPPERS for line in text.splitlines())
    # From torch 2.14 on, assertions on strides name the operator that a value comes from.
    return [line for line in lines if "torch.ops.tritium." in line and not line.startswith(("#", "assert_"))]


def sources(observer: KernelObserver) -> list[str]:
    return [kernel.source for kernel in observer.dissection.kernels]


def folders(observer: KernelObserver, folder: Path) -> list[Path]:
    return kernel_dump.write(folder, observer.dissection.kernels, observer.kernels)
