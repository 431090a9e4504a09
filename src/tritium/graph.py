"""Queries on fx graphs: values, storages, mutations, convolutions; copies and fingerprints."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true

from tritium import compat

# With fewer nodes per convolution, a graph is a decoder or UNet and not a transformer with a patch embedding.
NODES_PER_CONVOLUTION = 300

_CONVOLUTIONS = {
    getattr(space, f"conv{transpose}{rank}d"): rank
    for space in (torch, F)
    for transpose in ("", "_transpose")
    for rank in (1, 2, 3)
} | {torch.convolution: None, torch.ops.aten.convolution.default: None}


def spatial_convolutions(graph: fx.Graph) -> list[fx.Node]:
    """Return the 2-D and 3-D convolutions of Dynamo's graph, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and _CONVOLUTIONS.get(node.target) in (2, 3)]


def is_dynamic(graph: fx.Graph) -> bool:
    """Return True if a placeholder has free symbols: a size may change without a recompile."""
    values = map(value_of, graph.find_nodes(op="placeholder"))
    return any(isinstance(value, (torch.Tensor, torch.SymInt)) and bool(free_symbols(value)) for value in values)


def is_conv_heavy(graph: fx.Graph) -> bool:
    """Return True if convolutions dominate."""
    convolutions = sum(node.op == "call_function" and node.target in _CONVOLUTIONS for node in graph.nodes)
    return bool(len(graph.nodes) < NODES_PER_CONVOLUTION * convolutions)


def value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def call(node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Call the function or method of a node on these arguments."""
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def same_size(left: Any, right: Any) -> bool:
    """Return True if two sizes are equal for all symbol values; `==` would add a guard and recompiles."""
    return left is right or statically_known_true(left == right)


def same_shape(left: Sequence[Any] | None, right: Sequence[Any] | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    return all(map(same_size, left, right))


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument by position or keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
_IN_PLACE_OPERATORS = frozenset(
    {*(getattr(operator, name) for name in _IN_PLACE), *(f"__{name}__" for name in _IN_PLACE)}
)


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node writes to."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    out = node.kwargs.get("out")
    if out is not None:
        return [part for part in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(part, fx.Node)]
    if compat.operators.is_mutable(node.target):
        return list(node.all_input_nodes)
    in_place = node.target in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    if in_place or argument_flag(node, "inplace"):
        return [arg for arg in node.args[:1] if isinstance(arg, fx.Node)]
    return []


def live_nodes(graph: fx.Graph, acts: Callable[[fx.Node], Any] = mutated_arguments) -> set[fx.Node]:
    """Return nodes that reach the output or a node with side effects; Dynamo's graph still contains dead code."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or acts(node):
            live |= {node, *node.all_input_nodes}
    return live


def argument_flag(node: fx.Node, name: str) -> bool:
    """Return True if a flag is set, by keyword or by position as in `F.leaky_relu(x, 0.2, True)`."""
    if node.kwargs.get(name) is True:
        return True
    if not callable(node.target) or not any(arg is True for arg in node.args):
        return False
    try:
        return inspect.signature(node.target).bind_partial(*node.args).arguments.get(name) is True
    except (TypeError, ValueError):
        # A builtin without a signature: none of these has such a flag.
        return False


def storages(nodes: Sequence[fx.Node]) -> set[int]:
    """Return the identities of the storages behind some nodes' values."""
    return {compat.tensors.storage_id(value) for node in nodes for value in tensors_of(value_of(node))}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, which may be a tuple or list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)


def copied(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, including attributes that Dynamo sets on nodes outside of `meta`."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda source: nodes[source])
        compat.operators.copy_source(nodes[node], node)
    return copy


def with_graph(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return Dynamo's module with another graph and the attributes that AOTAutograd reads."""
    module = fx.GraphModule(gm, graph)
    module.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(module, name, getattr(gm, name))
    return module


def fingerprint(graph: fx.Graph) -> int:
    """Return a hash that is equal for graphs with the same operations in the same order."""
    index = {node: position for position, node in enumerate(graph.nodes)}
    return hash(
        tuple(
            (node.op, str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda source: index[source])))
            for node in graph.nodes
        )
    )
