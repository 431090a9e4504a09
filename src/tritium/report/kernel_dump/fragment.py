"""The operators that a kernel replaces, as a graph and as a script that runs alone."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat import kernel_benchmark
from tritium.compat.dynamo import known_size

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
    inside = {node for node in origins if node.op == "call_function"}
    # Inductor has no node for selecting one of several results.
    inside |= {user for node in inside for user in node.users if user.target is operator.getitem}
    inside = {node for node in inside if node.name not in cut}
    ends = {node for node in inside if node.name in wanted}
    ends = ends or {node for node in inside if any(user not in inside for user in node.users)}
    needed = _needed(ends, inside, cut)
    calls = [node for node in graph.nodes if node in needed]
    return _extracted(calls, [node for node in calls if node in ends or node.name in also])


def _needed(ends: Iterable[fx.Node], inside: Collection[fx.Node], cut: Collection[str | None]) -> set[fx.Node]:
    """Return the nodes that compute `ends`, with views and sizes, so that buffers and sizes are the inputs."""

    def is_free(node: fx.Node) -> bool:
        if node.op != "call_function" or node.name in cut:
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


def _extracted(calls: Sequence[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
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
    part.output({node.name: copies[node] for node in results if isinstance(node.meta.get("val"), torch.Tensor)})
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
