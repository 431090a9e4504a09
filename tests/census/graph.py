"""The operations of a graph that Dynamo captured, in the form in which eager calls are recorded."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from census.record import Call, op_name
from census.statements import Statement, statement_at

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# These hand on a part or another view of their first argument, or the argument itself.
VIEWS = frozenset(
    """
    getitem view reshape unflatten flatten transpose swapaxes permute unsqueeze squeeze expand chunk split unbind
    """.split()  # noqa: SIM905 - shorter than one name per line
)
SAME = frozenset(("to", "float", "type_as", "contiguous", "dropout"))


class Capture:
    """A `torch.compile` backend that keeps the graphs it gets and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def graph_calls(module: GraphModule) -> list[tuple[Call, bool]]:
    """Return each operation made under a diffusers statement, and whether the graph's output depends on it."""
    live = live_nodes(module.graph)
    calls: dict[Node, Call] = {}
    for node in module.graph.nodes:
        value = _value(node)
        statement = _statement(node)
        if node.op in {"call_function", "call_method"} and statement is not None and isinstance(value, torch.Tensor):
            producer = (
                calls.get(_through_no_ops(node.args[0])) if node.args and isinstance(node.args[0], Node) else None
            )
            calls[node] = Call(
                op_name(node.target, node.args, dict(node.kwargs), value.ndim), statement, producer, node
            )
    return [(call, node in live) for node, call in calls.items()]


def live_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that the output depends on; a write is needed when what it writes into is."""
    writes = [node for node in graph.nodes if is_write(node)]
    live: set[Node] = set()
    pending = [node for node in graph.nodes if node.op == "output"]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending.extend(node.all_input_nodes)
        if not pending:
            pending = [write for write in writes if write not in live and base_of(write.args[0]) in live]
    return live


def is_write(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("_")
    return name == "setitem" or (node.op == "call_method" and in_place)


def base_of(node: Node) -> Node:
    while node.op in {"call_function", "call_method"} and _bare_name(node) in VIEWS:
        node = node.args[0]
    return node


def _through_no_ops(node: Node) -> Node:
    while node.op in {"call_function", "call_method"} and _bare_name(node) in SAME:
        source = node.args[0]
        if _value(source).dtype != _value(node).dtype:
            break
        node = source
    return node


def _bare_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _statement(node: Node) -> Statement | None:
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    found = (statement_at(filename, int(line)) for filename, line in reversed(frames))
    return next((statement for statement in found if statement is not None), None)
