"""Convert values that enter a channels-last region, and restore those that leave it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.passes import freezing
from tritium.compiler.passes.channels_last.region import Model
from tritium.compiler.passes.channels_last.strides import (
    as_dynamo_does,
    is_channels_last,
    order_in_memory,
    same_strides,
)
from tritium.graph import call, value_of
from tritium.ops.memory_format import FORMATS

# `tritium::channels_last(x)`: a channels-last copy that Inductor does not inline. Inductor treats
# `x.contiguous(memory_format=...)` as an expression and computes it again in every kernel that reads it, so that each
# would read the image across its strides. This op writes a separate buffer once, with a kernel that Inductor tiles.
_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("channels_last(Tensor x) -> Tensor")


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=FORMATS[x.dim()])


_LIBRARY.impl("channels_last", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::channels_last", _copy, lib=_LIBRARY)

CHANNELS_LAST = torch.ops.tritium.channels_last.default


def make_known_to_inductor() -> None:
    """Register the op's lowering before a graph with it is lowered; ATen copies if torch lacks support."""
    compat.lowerings.lower(CHANNELS_LAST, compat.lowerings.channels_last)


class Border:
    """The conversions around the regions of one graph, each inserted once."""

    def __init__(self, graph: fx.Graph, model: Model) -> None:
        self.graph, self.model = graph, model
        # Nodes whose strides differ from the model's, and nodes that share memory with other values than in the model.
        self.converted: set[fx.Node] = set()
        self.realiased: set[fx.Node] = set()
        # Conversions of values that enter and leave regions.
        self.entries: dict[fx.Node, None] = {}
        self.exits: dict[fx.Node, None] = {}
        # Names of the operations before which values were restored, with counts.
        self.stops: Counter[str] = Counter()
        self._inserted: list[fx.Node] = []
        self._channels_last: dict[fx.Node, fx.Node] = {}
        # The flag tells whether the node is a view of its restored source.
        self._restored: dict[tuple[fx.Node, bool], fx.Node] = {}

    # --- into a region ---

    def enter(self, node: fx.Node, readers: Sequence[fx.Node]) -> None:
        """Convert a value once for several operations, instead of each of their results."""
        is_input = node.op in ("placeholder", "get_attr")
        place = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        copy = self.copy(node, place if is_input else node.next, readers[0])
        self.model.insert_copy(copy, node)
        self._restored |= {(copy, False): node, (copy, True): node}
        self._channels_last[node] = copy
        self.converted.add(copy)
        self.entries[copy] = None
        for reader in readers:
            reader.replace_input_with(node, copy)

    def channels_last(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Return a value as channels-last, for an operation at `place`."""
        value = value_of(node)
        if is_channels_last(value):
            return node
        if node not in self._channels_last:
            conversion = self._insert(place, "contiguous", node, memory_format=FORMATS[value.dim()])
            self._channels_last[node] = conversion
            self.entries[conversion] = None
        return self._channels_last[node]

    def weight(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Clone a weight as channels-last; `contiguous` would return a 1x1 kernel with its old strides."""
        if node not in self._channels_last:
            clone = self._insert(place, "clone", node, memory_format=FORMATS[value_of(node).dim()])
            freezing.mark(clone)
            # The user may have converted it already.
            self._channels_last[node] = node if same_strides(value_of(clone), value_of(node)) else clone
        return self._channels_last[node]

    def copy(self, node: fx.Node, place: fx.Node, origin: fx.Node) -> fx.Node:
        """Insert a channels-last copy of a value, which Inductor writes to memory."""
        return self._insert(place, CHANNELS_LAST, node, origin=origin)

    # --- out of a region ---

    def restore_inputs(self, node: fx.Node) -> None:
        """End the region before a node: give its inputs the strides, and for views the memory, that the model has."""
        shared = node.op == "output" or self.model.is_view(node)
        changed = self.converted | self.realiased if shared else self.converted
        sources = [source for source in node.all_input_nodes if source in changed]
        for source in sources:
            node.replace_input_with(source, self._original(source, node, shared))
        if sources:
            self.stops["output" if node.op == "output" else str(getattr(node.target, "__name__", node.target))] += 1

    def _original(self, node: fx.Node, place: fx.Node, shared: bool) -> fx.Node:
        """Return a node with the strides, and if `shared` the sharing of memory, of a value of the model."""
        if node not in self.converted and not (shared and node in self.realiased):
            return node
        view = shared and self.model.is_view(node)
        if (node, view) not in self._restored:
            order = None if view else order_in_memory(self.model.values[node])
            if order is not None:
                restored = self._packed_in(order, node, place)
                self.exits[restored] = None
            else:
                restored = self._repeated(node, place, shared)
            self._restored[node, view] = restored
        return self._restored[node, view]

    def _packed_in(self, order: Sequence[int], node: fx.Node, place: fx.Node) -> fx.Node:
        """Insert a copy whose dims have the given order in memory."""
        if list(order) == sorted(order):
            return self._insert(place, "clone", node, memory_format=torch.contiguous_format)
        transposed = self._insert(place, "permute", node, *order)
        clone = self._insert(place, "clone", transposed, memory_format=torch.contiguous_format)
        return self._insert(place, "permute", clone, *(list(order).index(dim) for dim in range(len(order))))

    def _repeated(self, node: fx.Node, place: fx.Node, shared: bool) -> fx.Node:
        """Insert the node again with restored inputs, such as a transposed view of a value."""
        args, kwargs = fx.map_arg(self.model.arguments[node], lambda source: self._original(source, place, shared))
        with self.graph.inserting_before(place):
            repeated = self.graph.create_node(node.op, node.target, args, kwargs)
        repeated.meta = {**node.meta, "example_value": self.model.values[node]}
        return repeated

    def remove_unused(self) -> None:
        """Remove conversions for convolutions that were given up."""
        for node in reversed(self._inserted):
            if not node.users:
                self.graph.erase_node(node)
                self.entries.pop(node, None)
                self.exits.pop(node, None)

    def _insert(
        self,
        place: fx.Node,
        target: str | Callable[..., Any],
        source: fx.Node,
        *args: Any,
        origin: fx.Node | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Insert a call before `place` on behalf of `origin`, with its fake value."""
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(place):
            node = self.graph.create_node(op, target, (source, *args), kwargs)
        value = value_of(source)
        with as_dynamo_does(value):
            node.meta["example_value"] = call(node, value, *args, **kwargs)
        meta = (origin or place).meta
        node.meta |= {name: meta[name] for name in ("stack_trace", "nn_module_stack") if name in meta}
        self._inserted.append(node)
        return node
