"""Describe generated kernels during code generation: source, loops, operators and arguments.

Descriptions are text, so that they keep nothing of the graph alive and can be stored with the cache entry, for
processes that find the kernels already compiled. `tritium.report.kernel_dump` writes them as folders.
"""

from __future__ import annotations

import base64
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from tritium import compat
from tritium.compiler.dump import onnx_bytes
from tritium.report.kernel_dump import benchmark

_HEADER = '''"""The operators that {name} stands for, run one by one.

    python fragment.py
"""

from __future__ import annotations

import math
import operator

import torch

INPUTS = {inputs}


{make}

def make_inputs():
    torch.manual_seed(0)
    return {{name: make(spec) for name, spec in INPUTS.items()}}


def run({parameters}):
{body}


if __name__ == "__main__":
    for name, value in run(**make_inputs()).items():
        print(name, value.dtype, tuple(value.shape), value.stride())
'''


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its Inductor nodes, their original graph nodes, and the buffers that it reads."""

    name: str
    nodes: Sequence[Any]
    origins: Sequence[fx.Node]
    reads: set[str]


class Dissection:
    """The kernels of one lowering, each name once."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[str, str]] = {}
        self._launches: dict[str, Callable[[], list[compat.kernels.KernelArgument]]] = {}
        self.found: list[dict[str, Any]] = []

    def source(self, name: str, language: str, text: str) -> None:
        self._sources[name] = (language, text)

    def launch(self, name: str, arguments: Callable[[], list[compat.kernels.KernelArgument]]) -> None:
        self._launches.setdefault(name, arguments)

    def graph(self, graph: fx.Graph, kernels: Iterable[Kernel]) -> None:
        """Collect the descriptions of all kernels."""
        done: set[str] = set()
        for kernel in kernels:
            if kernel.name in self._sources and kernel.name not in done:
                done.add(kernel.name)
                self.found.append(self._one(graph, kernel))

    def unfinished(self) -> list[dict[str, Any]]:
        """Return the sources of an incomplete code generation, with the reason why the rest is missing."""
        if self.found:
            return self.found
        reason = "code generation failed before this kernel was launched"
        return [
            {"name": name, "language": language, "source": text, "operators": [], "not_runnable": reason}
            for name, (language, text) in self._sources.items()
        ]

    def _one(self, graph: fx.Graph, kernel: Kernel) -> dict[str, Any]:
        language, source = self._sources[kernel.name]
        entry: dict[str, Any] = {
            "name": kernel.name,
            "language": language,
            "source": source,
            "operators": _operators(kernel.origins),
            "loops": None,
            "fragment": None,
            "drawing": None,
            "arguments": [],
            "device": "cuda" if language == "triton" else "cpu",
            "missing": {},
        }
        steps: dict[str, Callable[[], None]] = {
            "arguments": lambda: self._add_arguments(entry, graph, kernel.reads),
            "loops.txt": lambda: entry.update(loops=compat.observation.loops_of(kernel.nodes)),
            "fragment.py": lambda: _add_fragment(entry, graph, kernel.origins),
        }
        for what, step in steps.items():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a failed description must not stop compilation
                entry["missing"][what] = f"{type(error).__name__}: {error}"
        if not entry["arguments"]:
            entry["not_runnable"] = entry["missing"].get("arguments", "it is launched as part of another kernel")
        return entry

    def _add_arguments(self, entry: dict[str, Any], graph: fx.Graph, reads: set[str]) -> None:
        launch = self._launches.get(entry["name"])
        if launch is None:
            return
        given = launch()
        names = parameter_names(entry["source"], entry["language"])
        if len(names) < len(given):
            raise ValueError(f"{len(given)} arguments for the {len(names)} parameters of the source")
        by_name = {node.name: node for node in graph.nodes}

        def held_by(argument: compat.kernels.KernelArgument) -> str | None:
            return argument.node if _holds(argument, by_name.get(argument.node or "")) else None

        # A buffer that is overwritten in place is passed under the name it is written as, but read under another.
        overwritten = sorted(reads - {argument.buffer for argument in given})
        in_place = sum(parameter.startswith("in_out_ptr") for parameter in names)
        before = held_by(compat.kernels.buffer_argument(overwritten[0])) if len(overwritten) == in_place == 1 else None
        arguments = []
        for parameter, argument in zip(names, given, strict=False):
            told: dict[str, Any] = {"parameter": parameter, "kind": argument.kind}
            if argument.kind == "number":
                arguments.append({**told, "value": argument.value})
                continue
            told |= {name: getattr(argument, name) for name in ("dtype", "size", "stride", "device", "buffer")}
            if argument.kind == "tensor":
                is_both = parameter.startswith("in_out_ptr")
                told["input"] = parameter.startswith("in_ptr") or (is_both and bool(overwritten))
                told["output"] = is_both or parameter.startswith("out_ptr")
                told["reads"] = (before if is_both else held_by(argument)) if told["input"] else None
                told["writes"] = held_by(argument) if told["output"] else None
            arguments.append(told)
        entry["arguments"] = arguments
        entry["device"] = next((a.device.partition(":")[0] for a in given if a.device), entry["device"])


def parameter_names(source: str, language: str) -> list[str]:
    """Return the parameter names of a kernel's function; for Triton only those that a launch passes."""
    if language == "cpp":
        start = source.rindex('extern "C"')
        inner = source[source.index("(", start) + 1 : source.index(")", start)]
        return [parameter.split()[-1] for parameter in inner.split(",") if parameter.strip()]
    functions = re.findall(r"^def \w+\(([^)]*)\):", source, re.MULTILINE)
    if not functions:
        raise ValueError("no function in the source")
    # The combine function of a scan comes before the kernel.
    parameters = [parameter.strip() for parameter in functions[-1].split(",")]
    return [parameter for parameter in parameters if parameter and "tl.constexpr" not in parameter]


def _holds(argument: compat.kernels.KernelArgument, node: fx.Node | None) -> bool:
    """Return True if a buffer holds exactly a node's value, not a part of it or a rearrangement."""
    value = node.meta.get("val") if node is not None else None
    if not isinstance(value, torch.Tensor) or str(value.dtype).removeprefix("torch.") != argument.dtype:
        return False
    return tuple(_size(size) for size in value.shape) == argument.size


# --- the fragment -----------------------------------------------------------------------------------------------------


def _add_fragment(entry: dict[str, Any], graph: fx.Graph, origins: Sequence[fx.Node]) -> None:
    tensors = [argument for argument in entry["arguments"] if argument["kind"] == "tensor"]
    read = {argument["reads"] for argument in tensors if argument["input"]}
    # If every input is a node's value, the fragment starts there; otherwise at the inputs of its operators.
    cut = read if None not in read else set()
    wanted = {argument["writes"] for argument in tensors if argument["output"]} - {None}
    part = fragment(graph, origins, cut, wanted, also=read - {None})
    entry["fragment"] = script(part, entry["name"])
    entry["drawing"] = base64.b64encode(onnx_bytes(part, entry["name"])).decode()


def fragment(
    graph: fx.Graph,
    origins: Sequence[fx.Node],
    cut: Collection[str | None],
    wanted: Collection[str | None],
    also: Collection[str] = (),
) -> fx.Graph:
    """Return the part of a graph that computes `wanted` from `cut` and from nodes outside of `origins`.

    Without wanted nodes it computes all of `origins` that are read from outside. Nodes in `also` are returned too, if
    they are in the part.
    """
    inside = {node for node in origins if node.op == "call_function"}
    # Inductor has no node for selecting one of several results.
    inside |= {user for node in inside for user in node.users if user.target is operator.getitem}
    inside = {node for node in inside if node.name not in cut}
    ends = [node for node in inside if node.name in wanted]
    if not ends:
        ends = [node for node in inside if any(user not in inside for user in node.users)]
    needed: dict[fx.Node, None] = {}
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed[node] = None
        # Include views and size computations, so that buffers and sizes are the inputs.
        stack += [
            source
            for source in node.all_input_nodes
            if source in inside or (source.name not in cut and source.op == "call_function" and _is_free(source))
        ]
    ordered = [node for node in graph.nodes if node in needed]
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        for source in node.all_input_nodes:
            if source not in needed and source not in copies:
                copies[source] = part.placeholder(source.name)
                copies[source].meta = dict(source.meta)
    for node in ordered:
        copies[node] = part.node_copy(node, lambda source: copies[source])
        copies[node].name = node.name
    results = [node for node in ordered if node in ends or node.name in also]
    part.output(tuple(copies[node] for node in results if isinstance(node.meta.get("val"), torch.Tensor)))
    return part


def _is_free(node: fx.Node) -> bool:
    return compat.observation.is_view(node.target) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def script(graph: fx.Graph, name: str) -> str:
    """Return a Python file that creates the inputs of a graph of operators and runs it."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    specs = "".join(f"    {node.name!r}: {_spec(node.meta.get('val'))},\n" for node in placeholders)
    body = []
    for node in graph.nodes:
        if node.op == "call_function":
            given = [*map(_spelled, node.args), *(f"{key}={_spelled(value)}" for key, value in node.kwargs.items())]
            body.append(f"    {node.name} = {_target(node)}({', '.join(given)})")
        elif node.op == "output":
            body.append("    return {" + ", ".join(f'"{out.name}": {out.name}' for out in node.args[0]) + "}")
    return _HEADER.format(
        name=name,
        inputs="{\n" + specs + "}",
        make=inspect.getsource(benchmark.make),
        parameters=", ".join(node.name for node in placeholders),
        body="\n".join(body),
    )


def _spec(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {
            "kind": "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "size": tuple(_size(size) for size in value.shape),
            "stride": tuple(_size(step) for step in value.stride()),
            "device": str(value.device),
        }
    return {"kind": "number", "value": _size(value)}


def _size(value: Any) -> Any:
    if isinstance(value, (int, float, bool)):
        return value
    hint = compat.dynamo.size_hint(value)
    if hint is None:
        raise TypeError(f"{value} is not known before the model runs")
    return hint


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}"
    assert callable(node.target)
    return _get_qualified_name(node.target).replace("_operator.", "operator.")


def _spelled(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_spelled, value))
        return f"[{inner}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_spelled(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"math.{'nan' if math.isnan(value) else 'inf'}" if value > 0 or math.isnan(value) else "-math.inf"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return repr(_size(value))
    return repr(value)


def _operators(origins: Sequence[fx.Node]) -> list[str]:
    targets = (node.target for node in origins if isinstance(node.target, torch._ops.OpOverload))
    return list(dict.fromkeys(str(target.overloadpacket) for target in targets))
