"""Triton kernels without a GPU: Inductor generates Triton code for CPU tensors, and stops before anything is compiled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering

import tritium
from tiling.patterns import ALL
from tritium import compat


class _Stop(Exception):
    pass


@dataclass(frozen=True)
class Kernel:
    """One generated kernel."""

    name: str
    source: str

    @property
    def grid(self) -> str:
        return re.search(r"'grid_type': '(\w+)'", self.source)[1]

    @property
    def is_reduction(self) -> bool:
        return "r0_numel" in self.body

    @property
    def dims(self) -> int:
        """Dims of the grid's tile, without those of a reduction."""
        return len(self.numels)

    @property
    def signature(self) -> str:
        return re.search(r"\ndef [\w.]+\((.*)\):", self.source)[1]

    @property
    def body(self) -> str:
        return self.source[self.source.index("\ndef ") + 1 :]

    @property
    def numels(self) -> list[str]:
        return [name for name in "zyx" if f"{name}numel" in self.signature]


class Kernels(list[Kernel]):
    """Kernels in order, and the code that launches them, one text for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.wrappers: list[str] = []


@contextlib.contextmanager
def triton_on_cpu():
    """Inside, CPU tensors get Triton code, which is not compiled: calling it raises."""
    import torch._dynamo
    import torch.utils._triton

    def stop(inputs):
        raise _Stop("there is no code behind this")

    def compile_to_module(self):
        wrapper, *_ = self.codegen()
        kernels.wrappers.append(getattr(wrapper, "value", str(wrapper)))
        kernels.extend(Kernel(name, source) for source, name in self.wrapper_code.src_to_kernel.items())
        self.cache_key, self.cache_path, self.cache_linemap = "none", None, []
        return SimpleNamespace(call=stop)

    kernels = Kernels()
    settings = {"cpu_backend": "triton", "fx_graph_cache": False, "compile_threads": 1}
    with (
        mock.patch.object(torch.utils._triton, "triton_hash_with_backend", return_value="none"),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        inductor_config.patch(settings),
    ):
        yield kernels


def generate(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dynamic: Mapping[int, Sequence[int]] | None = None,
    *,
    backend: Any = "inductor",
    settings: Mapping[str, Any] | None = None,
) -> Kernels:
    """The Triton kernels of a function; `dynamic` maps an input's position to its dynamic dims."""
    torch._dynamo.reset()
    for position, dims in (dynamic or {}).items():
        torch._dynamo.mark_dynamic(inputs[position], list(dims))
    with (
        triton_on_cpu() as kernels,
        inductor_config.patch(dict(settings or {})),
        torch.no_grad(),
        contextlib.suppress(_Stop),
    ):
        torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    return kernels


def generate_pattern(
    name: str,
    *,
    dynamic: bool = True,
    dtype: torch.dtype = torch.float32,
    backend: Any = "inductor",
    policy: Any = None,
) -> tuple[list[Kernel], dict[str, Any]]:
    """The kernels of a pattern, and the decisions of `autofuse` if `policy` has the arguments of `enable`."""
    pattern = ALL[name]
    inputs = [tensor.to(dtype) for tensor in pattern.inputs()]
    arguments = pattern.function, inputs, pattern.dynamic if dynamic else None
    if policy is None:
        return generate(*arguments, backend=backend), {}
    with tritium.autofuse.enabled(**policy) as declined:
        assert declined is None
        return generate(*arguments, backend=backend), tritium.autofuse.decisions()


def hook_owner(attribute: str) -> Any:
    """Inductor's class or module that has a function which the policy uses."""
    return next(hook.owner for hook in compat.tiling.hooks() if hook.attribute == attribute)
