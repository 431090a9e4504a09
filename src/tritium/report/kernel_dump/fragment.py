"""The operators that a kernel replaces, as a graph and as a script that runs alone."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat.dynamo import known_size
from tritium.compat.operators import operator_of, qualified_name
from tritium.report.kernel_dump import benchmark

_SCRIPT = '''"""The operators that {name} stands for, run one by one.

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


def fragment(
    graph: fx.Graph,
    origins: Sequence[fx.Node],
    cut: Collection[str | None],
    wanted: Collection[str | None],
    also: Collection[str | None] = (),
) -> fx.Graph:
    """Return the part of a graph that computes `wanted` from `cut` and from nodes outside of `origins`.

    Without wanted nodes it computes all of `origins` that are read from outside. Nodes in `also` are returned too, if
    they are in the part.
    """
    inside = _inside(origins, cut)
    ends = {node for node in inside if node.name in wanted}
    ends = ends or {node for node in inside if any(user not in inside for user in node.users)}
    needed = _needed(ends, inside, cut)
    calls = [node for node in graph.nodes if node in needed]
    return _extracted(calls, [node for node in calls if node in ends or node.name in also])


def _inside(origins: Iterable[fx.Node], cut: Collection[str | None]) -> set[fx.Node]:
    inside = {node for node in origins if node.op == "call_function"}
    # Inductor has no node for selecting one of several results.
    inside |= {user for node in inside for user in node.users if user.target is operator.getitem}
    return {node for node in inside if node.name not in cut}


def _needed(ends: Iterable[fx.Node], inside: Collection[fx.Node], cut: Collection[str | None]) -> set[fx.Node]:
    """Return the nodes that compute `ends`, with views and sizes, so that buffers and sizes are the inputs."""

    def is_free(node: fx.Node) -> bool:
        is_size = not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        return (
            node.name not in cut and node.op == "call_function" and (is_size or compat.observation.is_view(node.target))
        )

    needed: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [source for source in node.all_input_nodes if source in inside or is_free(source)]
    return needed


def _extracted(calls: Sequence[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """Return a graph of some calls, whose other inputs are placeholders."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inner = set(calls)
    inputs = dict.fromkeys(source for node in calls for source in node.all_input_nodes if source not in inner)
    for source in inputs:
        copies[source] = part.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in calls:
        copies[node] = part.node_copy(node, lambda source: copies[source])
        copies[node].name = node.name
    part.output(tuple(copies[node] for node in results if isinstance(node.meta.get("val"), torch.Tensor)))
    return part


def script(graph: fx.Graph, name: str) -> str:
    """Return a Python file that creates the inputs of a graph of operators and runs it."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    specs = "".join(f"    {node.name!r}: {_spec(node.meta.get('val'))},\n" for node in placeholders)
    body = []
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [*map(_literal, node.args), *(f"{key}={_literal(value)}" for key, value in node.kwargs.items())]
            body.append(f"    {node.name} = {_target(node)}({', '.join(arguments)})")
        elif node.op == "output":
            body.append("    return {" + ", ".join(f'"{out.name}": {out.name}' for out in node.args[0]) + "}")
    return _SCRIPT.format(
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
            "size": tuple(map(known_size, value.shape)),
            "stride": tuple(map(known_size, value.stride())),
            "device": str(value.device),
        }
    return {"kind": "number", "value": known_size(value)}


def _target(node: fx.Node) -> str:
    if operator_of(node) is not None:
        return f"torch.ops.{node.target}"
    assert callable(node.target)
    return qualified_name(node.target).replace("_operator.", "operator.")


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_literal, value))
        return f"[{inner}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"math.{'nan' if math.isnan(value) else 'inf'}" if value > 0 or math.isnan(value) else "-math.inf"
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return repr(known_size(value))
    return repr(value)
