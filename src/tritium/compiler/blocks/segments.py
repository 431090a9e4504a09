"""Divide a graph into consecutive segments, each of which can become a separate graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tritium import compat
from tritium.compiler.blocks.facts import Facts
from tritium.graph import value_of


@dataclass(eq=False)
class Segment:
    """Nodes of a graph in order, their inputs from outside, and their values that are read outside.

    Inputs are in order of first use, outputs in order of computation: equal parts of a graph have them in equal order.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def segments_of(groups: Iterable[Sequence[fx.Node]], facts: Facts) -> list[Segment]:
    """Return a segment for each non-empty group of consecutive nodes."""
    return [_segment(list(group), facts) for group in groups if group]


def _segment(group: list[fx.Node], facts: Facts) -> Segment:
    inside = set(group)
    attributes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    for node in group:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                attributes[source] = None
            elif source not in inside:
                inputs[source] = None
    # A compiler needs the value of each symbol in the sizes of an input, and cannot solve an expression for it.
    for name in dict.fromkeys(name for node in (*inputs, *group) for name in facts.symbols[node]):
        if name in facts.sizes:
            inputs[facts.sizes[name]] = None
    outputs = [node for node in group if any(user in facts.live and user not in inside for user in node.users)]
    return Segment([*attributes, *group], list(inputs), outputs)


def is_item(node: fx.Node) -> bool:
    """Return whether a node takes an item of a tuple: it stays with the node that returns the tuple."""
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else None
    return isinstance(source, fx.Node) and not isinstance(value_of(source), torch.Tensor) and source.op != "placeholder"


def graph_of(segment: Segment) -> fx.Graph:
    """Return a new graph of one segment; the graph always returns a tuple."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
        _describe(copies[node], node)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    return graph


def _describe(placeholder: fx.Node, original: fx.Node) -> None:
    placeholder.meta = dict(original.meta)
    if original.op == "placeholder" and hasattr(original, "_dynamo_source"):
        placeholder._dynamo_source = original._dynamo_source
    else:
        compat.dynamo.describe_new_input(placeholder, is_static=False)
