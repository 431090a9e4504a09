"""Generate Triton code for CPU tensors on a machine without a GPU: everything but compiling and running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.graph import GraphLowering
from torch.utils import _triton

from tritium import compat, whitebox
from tritium.compiler.observe import KernelObserver


class _Generated(Exception):
    """Code generation is over: nothing is compiled."""


@contextlib.contextmanager
def _stopped_after_codegen() -> Iterator[None]:
    compile_to_module, key = GraphLowering.compile_to_module, _triton.triton_hash_with_backend

    def stop(self: GraphLowering) -> None:
        self.codegen()
        raise _Generated

    GraphLowering.compile_to_module, _triton.triton_hash_with_backend = stop, lambda *args, **kwargs: "none"
    try:
        with inductor.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1):
            yield
    finally:
        GraphLowering.compile_to_module, _triton.triton_hash_with_backend = compile_to_module, key


def generated(
    function: Callable[..., Any], *inputs: torch.Tensor, dynamic: dict[int, list[int]] | None = None, **settings: Any
) -> KernelObserver:
    """What code generation made of a function; `dynamic` are the dims of each input that have no fixed size."""
    for index, dims in (dynamic or {}).items():
        torch._dynamo.mark_dynamic(inputs[index], dims)
    observer = KernelObserver("cpu")
    torch._dynamo.reset()
    with _stopped_after_codegen(), inductor.patch(settings), torch.inference_mode():
        try:
            with compat.observed_codegen(observer), compat.recorded_kernels(observer):
                torch.compile(function, fullgraph=True)(*inputs)
        except Exception as error:
            if "_Generated" not in f"{type(error).__name__} {error}":
                raise
    assert observer.saw_codegen
    return observer


def sources(observer: KernelObserver) -> list[str]:
    return [kernel["source"] for kernel in observer.dissection.found]


def folders(observer: KernelObserver, folder: Any) -> list[Any]:
    return whitebox.write(folder, observer.dissection.found, observer.kernels)
