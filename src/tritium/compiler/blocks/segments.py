"""Divide a graph into consecutive segments, and join their compiled code again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.graph import argument, live_nodes, mutated_arguments, storages, value_of

_RANDOM = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal poisson binomial rrelu
    gumbel_softmax dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
    """.split()  # noqa: SIM905 - shorter than one name per line
)


class Facts:
    """The memory, writes and symbols of each node of a graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        nodes = list(gm.graph.nodes)
        # Nodes that a result depends on, or that have side effects; others are dropped.
        self.live = live_nodes(gm.graph, acts)
        # Attributes are not among them: they belong to every segment that reads them. Items of a tuple follow the node that
        # returns the tuple, because segments cannot exchange tuples.
        kinds = ("call_function", "call_method", "call_module")
        roots = [node for node in nodes if node.op in kinds and not is_item(node)]
        self.calls = [call for node in roots for call in _with_items(node) if call in self.live]
        self.storages = {node: storages([node]) for node in nodes}
        # The memory that a node writes to.
        self.written = {node: self.memory_of(arguments) for node in nodes if (arguments := mutated_arguments(node))}
        self.symbols = {node: _symbols_in(value_of(node)) for node in nodes}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.of_inputs = self.memory_of(placeholders)
        # The node that created each storage.
        self.maker: dict[int, fx.Node] = {}
        for node in nodes:
            for storage in self.storages[node]:
                self.maker.setdefault(storage, node)
        # The inputs that are symbolic sizes, by symbol.
        self.sizes: dict[str, fx.Node] = {}
        for node in placeholders:
            value = value_of(node)
            if isinstance(value, torch.SymInt) and [str(value)] == self.symbols[node]:
                self.sizes.setdefault(str(value), node)

    def memory_of(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the storages of some nodes' values."""
        return {storage for node in nodes for storage in self.storages[node]}

    def written_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the storages that some nodes write to."""
        return {storage for node in nodes for storage in self.written.get(node, ())} if self.written else set()


def acts(node: fx.Node) -> bool:
    """Return whether a node has side effects: it writes, uses random numbers or switches a mode."""
    name = name_of(node.target)
    if node.op == "call_module" or mutated_arguments(node):
        return True
    # In evaluation mode dropout uses no random numbers.
    draws = name in _RANDOM and not ("dropout" in name and argument(node, 2, "training", True) is False)
    return draws or name.startswith(("_enter", "_exit", "_set", "set_", "manual_seed"))


def name_of(target: Any) -> str:
    """Return the name of an operation from any kind of fx target."""
    if isinstance(target, compat.operators.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _symbols_in(value: Any) -> list[str]:
    """Return the names of the symbols in the sizes, strides and offset of a value, in order."""
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset()] if value.layout is torch.strided else []
        return [name for number in numbers if type(number) is not int for name in _symbols_in(number)]
    if isinstance(value, (tuple, list)):
        return [name for part in value for name in _symbols_in(part)]
    expression = getattr(getattr(value, "node", None), "expr", None)
    return sorted(map(str, expression.free_symbols)) if expression is not None else []


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
    return [_segment(group, facts) for group in groups if group]


def _segment(group: Sequence[fx.Node], facts: Facts) -> Segment:
    inside = set(group)
    outside = dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside)
    attributes = [source for source in outside if source.op == "get_attr"]
    inputs = {source: None for source in outside if source.op != "get_attr"}
    # A compiler needs the value of each symbol in the sizes of an input, and cannot solve an expression for it.
    symbols = dict.fromkeys(name for node in (*inputs, *group) for name in facts.symbols[node])
    inputs |= {facts.sizes[name]: None for name in symbols if name in facts.sizes}
    outputs = [node for node in group if any(user in facts.live and user not in inside for user in node.users)]
    return Segment([*attributes, *group], list(inputs), outputs)


def is_item(node: fx.Node) -> bool:
    """Return whether a node takes an item of a tuple: it stays with the node that returns the tuple."""
    source = node.args[0] if node.op == "call_function" and node.target is operator.getitem else None
    return isinstance(source, fx.Node) and not isinstance(value_of(source), torch.Tensor) and source.op != "placeholder"


def _with_items(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if is_item(user):
            yield from _with_items(user)


def graph_of(segment: Segment) -> fx.Graph:
    """Return a new graph of one segment; the graph always returns a tuple."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if node.op != "placeholder" or not compat.operators.copy_source(copies[node], node):
            compat.dynamo.describe_new_input(copies[node], is_static=False)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    return graph


def stitch(graph: fx.Graph, segments: Sequence[Segment], runs: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Generate a flat function with a graph's inputs and results that runs the code of its segments in order.

    It drops each value at its last use.
    """
    placeholders = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    names = {node: f"a{place}" for place, node in enumerate(placeholders)}
    for segment in segments:
        names |= {node: f"v{len(names) + place}" for place, node in enumerate(segment.outputs)}
    constants: dict[str, Any] = {f"run{place}": compat.inductor.boxed(run) for place, run in enumerate(runs)}
    last = {node: place for place, segment in enumerate(segments) for node in segment.inputs}
    returned = set(output.all_input_nodes)
    lines = [f"def call({', '.join(names[node] for node in placeholders)}):"]
    for place, segment in enumerate(segments):
        lines.append(f"    values = [{', '.join(names[node] for node in segment.inputs)}]")
        read_last = [names[node] for node in segment.inputs if last[node] == place and node not in returned]
        if read_last:
            # Delete them before the piece runs: the piece empties the list, and can then free the memory.
            lines.append(f"    del {', '.join(read_last)}")
        results = "".join(f"{names[node]}, " for node in segment.outputs)
        lines.append(f"    {f'{results}= ' if results else ''}run{place}(values)")

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (tuple, list)):
            inner = "".join(f"{text(part)}, " for part in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, dict):
            return "{" + "".join(f"{name!r}: {text(part)}, " for name, part in value.items()) + "}"
        name = f"constant{len(constants)}"
        constants[name] = value
        return name

    lines.append(f"    return {text(output.args[0])}")
    exec(compile("\n".join(lines), "<tritium.blocks>", "exec"), constants)  # noqa: S102 - the text above, of names alone
    call: Callable[..., Any] = constants["call"]
    return call
