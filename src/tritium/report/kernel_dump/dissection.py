"""Describe generated kernels during code generation: source, loops, operators and arguments.

Descriptions are text, so that they keep nothing of the graph alive and can be stored with the cache entry, for
processes that find the kernels already compiled.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat import kernel_benchmark
from tritium.compat.dynamo import known_size
from tritium.compat.observation import KernelArgument, loops_of
from tritium.report.graph_text import GraphNode
from tritium.report.kernel_dump import KernelSource
from tritium.report.neighbours import GeneratedKernel

_SCRIPT = '''"""The operators that {name} stands for, run one by one.

    python fragment.py
"""

from __future__ import annotations

from math import inf, nan

import torch
from torch import device

INPUTS = {inputs}


{make}

def make_inputs():
    torch.manual_seed(0)
    return {{name: make(spec) for name, spec in INPUTS.items()}}


{run}


if __name__ == "__main__":
    for name, value in run(**make_inputs()).items():
        print(name, value.dtype, tuple(value.shape), value.stride())
'''


class Dissection:
    """The kernels of one lowering, each name once."""

    def __init__(self) -> None:
        # Sources without a description.
        self._defined: dict[str, KernelSource] = {}
        self._launches: dict[str, Callable[[], list[KernelArgument]]] = {}
        self.kernels: list[KernelSource] = []

    def source(self, name: str, language: str, text: str) -> None:
        reason = "code generation failed before this kernel was launched"
        self._defined[name] = KernelSource(name=name, language=language, source=text, not_runnable=reason)

    def launch(self, name: str, arguments: Callable[[], list[KernelArgument]]) -> None:
        self._launches.setdefault(name, arguments)

    def graph(self, graph: fx.Graph, kernels: Iterable[GeneratedKernel]) -> None:
        for kernel in kernels:
            result = self._defined.pop(kernel.name, None)
            if result is not None:
                self._describe(result, graph, kernel)
                self.kernels.append(result)

    def unfinished(self) -> list[KernelSource]:
        """Return the sources of an incomplete code generation, with the reason why the rest is missing."""
        return self.kernels or list(self._defined.values())

    def _describe(self, result: KernelSource, graph: fx.Graph, kernel: GeneratedKernel) -> None:
        result.operators = kernel.operators
        result.device = "cuda" if result.language == "triton" else "cpu"
        parts = (("arguments", self._add_arguments), ("loops.txt", _add_loops), ("fragment.py", _add_fragment))
        for part, add in parts:
            try:
                add(result, graph, kernel)
            except Exception as error:  # noqa: BLE001 - a failed description must not stop compilation
                result.missing[part] = f"{type(error).__name__}: {error}"
        otherwise = result.missing.get("arguments", "it is launched as part of another kernel")
        result.not_runnable = None if result.arguments else otherwise

    def _add_arguments(self, result: KernelSource, _: fx.Graph, kernel: GeneratedKernel) -> None:
        launch = self._launches.get(kernel.name)
        if launch is not None:
            launched = launch()
            names = parameter_names(result.source, result.language)
            if len(names) < len(launched):
                raise ValueError(f"{len(launched)} arguments for the {len(names)} parameters of the source")
            pairs = zip(names, launched, strict=False)
            result.arguments = [replace(argument, parameter=parameter) for parameter, argument in pairs]
            result.device = next((a.device.partition(":")[0] for a in launched if a.device), result.device)


def parameter_names(source: str, language: str) -> list[str]:
    """Return the parameter names of a kernel's function; for Triton only those that a launch passes."""
    if language == "cpp":
        return [parameter.split()[-1] for parameter in kernel_benchmark.cpp_parameters(source)]
    # The combine function of a scan comes before the kernel.
    *_, inner = re.findall(r"^def \w+\(([^)]*)\):", source, re.MULTILINE)
    parameters = [parameter.strip() for parameter in inner.split(",")]
    return [parameter for parameter in parameters if parameter and "tl.constexpr" not in parameter]


def _add_loops(result: KernelSource, _: fx.Graph, kernel: GeneratedKernel) -> None:
    result.loops = loops_of(kernel.nodes)


def _add_fragment(result: KernelSource, graph: fx.Graph, kernel: GeneratedKernel) -> None:
    part = fragment(graph, kernel.origins)
    result.fragment = script(part, kernel.name)
    result.graph = [GraphNode.of(node) for node in part.nodes]


def fragment(graph: fx.Graph, origins: Sequence[fx.Node]) -> fx.Graph:
    """Return the part of a graph that computes all of `origins` that are read from outside."""
    inside = {node for node in origins if node.op == "call_function"}
    # Inductor has no node for selecting one of several results.
    inside |= {user for node in inside for user in node.users if user.target is operator.getitem}
    ends = {node for node in inside if any(user not in inside for user in node.users)}
    needed = _needed(ends, inside)
    calls = [node for node in graph.nodes if node in needed]
    return _extracted(calls, ends)


def _needed(ends: Iterable[fx.Node], inside: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that compute `ends`, with views and sizes, so that buffers and sizes are the inputs."""

    def is_free(node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        is_size = not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        return is_size or compat.observation.is_view(node.target)

    needed: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [source for source in node.all_input_nodes if source in inside or is_free(source)]
    return needed


def _extracted(calls: Sequence[fx.Node], results: Collection[fx.Node]) -> fx.Graph:
    """Return a graph of some calls, whose other inputs are placeholders."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inner = set(calls)
    for source in dict.fromkeys(source for node in calls for source in node.all_input_nodes if source not in inner):
        copies[source] = part.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in calls:
        copies[node] = part.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
    returned = [node for node in calls if node in results and isinstance(node.meta.get("val"), torch.Tensor)]
    part.output({node.name: copies[node] for node in returned})
    return part


def script(graph: fx.Graph, name: str) -> str:
    """Return a Python file that creates the inputs of a graph of operators and runs it."""
    specs = "".join(
        f"    {node.name!r}: {_spec(node.meta.get('val'))},\n" for node in graph.find_nodes(op="placeholder")
    )
    return _SCRIPT.format(
        name=name,
        inputs="{\n" + specs + "}",
        make=inspect.getsource(kernel_benchmark.make),
        run=re.sub(r"^def forward\(self(, )?", "def run(", graph.python_code("self").src.strip()),
    )


def _spec(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {
            "kind": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "size": tuple(map(known_size, value.shape)),
            "stride": tuple(map(known_size, value.stride())),
            "device": str(value.device),
        }
    return {"kind": "number", "value": known_size(value)}
