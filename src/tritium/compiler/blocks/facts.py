"""Memory, writes and symbols of the nodes of a graph, computed once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tritium.graph import argument, mutated_arguments, storages, value_of

_RANDOM = frozenset(
    (
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "multinomial", "normal", "poisson", "binomial", "rrelu", "gumbel_softmax"),
        *("dropout", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    )
)


class Facts:
    """The memory, writes and symbols of each node of a graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        nodes = list(gm.graph.nodes)
        # Nodes that a result depends on, or that have side effects; others are dropped. Attributes belong to every segment
        # that reads them.
        self.live = _live(gm.graph)
        self.calls = [
            node for node in nodes if node in self.live and node.op not in ("placeholder", "output", "get_attr")
        ]
        self.storages = {node: storages([node]) for node in nodes}
        # The memory that a node writes to.
        self.written = {node: self.memory_of(arguments) for node in nodes if (arguments := mutated_arguments(node))}
        self.symbols = {node: symbols_in(value_of(node)) for node in nodes}
        placeholders = [node for node in nodes if node.op == "placeholder"]
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
                self.sizes.setdefault(self.symbols[node][0], node)

    def memory_of(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the storages of some nodes' values."""
        return {storage for node in nodes for storage in self.storages[node]}

    def written_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the storages that some nodes write to."""
        if not self.written:
            return set()
        return {storage for node in nodes for storage in self.written.get(node, ())}


def _live(graph: fx.Graph) -> set[fx.Node]:
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or acts(node):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


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
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname)
    return str(getattr(target, "__name__", target))


def symbols_in(value: Any) -> list[str]:
    """Return the names of the symbols in the sizes, strides and offset of a value, in order."""
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset()] if value.layout is torch.strided else []
        return [name for number in numbers if type(number) is not int for name in symbols_in(number)]
    if isinstance(value, (tuple, list)):
        return [name for part in value for name in symbols_in(part)]
    expression = getattr(getattr(value, "node", None), "expr", None)
    return sorted(map(str, expression.free_symbols)) if expression is not None else []
