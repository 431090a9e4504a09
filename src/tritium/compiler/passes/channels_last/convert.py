"""Run convolutions channels-last, and keep that memory format between them.

Before:  conv2d(x, w) -> group_norm -> silu -> conv2d(., v) -> out
After:   x.contiguous(channels_last) -> conv2d(., w') -> group_norm -> silu -> conv2d(., v') -> clone(contiguous) -> out
         with w' and v' converted once, by freezing, and not on every call

A region is a set of convolutions connected by values of one format; a single convolution is not converted. Inside a
region, operations whose values do not depend on strides read inputs of any format. The format of their results is
computed by PyTorch on fake tensors and never assumed. A value that leaves the region (it is returned, or read by
another kind of operation) gets back its original strides. A tensor that is written to in place is never converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.passes import freezing
from tritium.compiler.passes.channels_last.agnostic_ops import DROPOUTS, FOLLOWERS, JOINS, QUERIES
from tritium.compiler.passes.channels_last.copy_op import CHANNELS_LAST, FORMATS, make_known_to_inductor
from tritium.compiler.passes.channels_last.strides import (
    as_dynamo_does,
    is_channels_last,
    is_contiguous,
    order_in_memory,
    same_kind,
    same_layout,
    tensors_of,
)
from tritium.graph import argument, mutated_arguments, same_shape, same_size, spatial_convolutions, storages, value_of
from tritium.passes import Applied, Decline, Pass, PassContext

# A single convolution would be converted in both directions, which cuDNN does itself.
FEWEST_CONVOLUTIONS = 2

# A 3-D convolution of 96 channels, 3x3x3, on one core: 111 ms and 110 ms in float32, 15.2 ms and 14.9 ms in bfloat16.
ON_A_CPU = "on a CPU Inductor lays out 2-D convolutions itself, and 3-D ones take as long in either layout"
NOT_EXACT = "fidelity 'exact': a channels-last convolution adds in another order"
ALONE = "no other convolution shares its layout"
GROUPED = "grouped: cuDNN is slower at these channels-last"
WRITTEN = "it reads or gives a tensor that is written to in place"
NO_TENSOR_CORES = "float32 without TF32 runs on no tensor cores, and those are what wants channels last"
NO_BATCH = "its input has no batch dim"
NOT_FOLLOWED = "its result is not the one Dynamo saw (autocast?), so its layout cannot be followed"
NOT_RESTORABLE = "the model gives its result strides that could not be restored"


def gate(device_type: str, fidelity: str) -> str | None:
    """Return why no graph is converted, or None.

    >>> gate("cuda", "close")
    >>> gate("cuda", "exact")
    "fidelity 'exact': a channels-last convolution adds in another order"
    """
    if fidelity == "exact":
        return NOT_EXACT
    if device_type == "cpu":
        return ON_A_CPU
    if device_type != "cuda":
        return f"not measured on {device_type!r}"
    return None


def run(graph: fx.Graph, context: PassContext) -> Applied | Decline:
    reason = context.read_only or gate(context.device_type, context.config.fidelity)
    convolutions = spatial_convolutions(graph)
    if reason is None and not convolutions:
        reason = "no 2-D or 3-D convolution"
    if reason is not None:
        return Decline(reason)
    if context.config.engine == "inductor":
        make_known_to_inductor()
    rewriter = _Rewriter(graph)
    reasons = Counter(rewriter.run(convolutions))
    done = len(convolutions) - reasons.total()
    if not done:
        return Decline("; ".join(f"{count} convolutions: {reason}" for reason, count in reasons.items()))
    summary = f"{done} of {len(convolutions)} convolutions channels-last; activations converted {rewriter.entered}x in"
    summary += f", {rewriter.left}x out"
    if rewriter.stops:
        summary += " (for " + ", ".join(f"{count}x {name}" for name, count in rewriter.stops.items()) + ")"
    return Applied(summary, reasons)


PASS = Pass("channels_last", run)


class _Rewriter:
    """Rewrite one graph in one walk from its inputs to its outputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._inserted: list[fx.Node] = []
        self._entries: list[fx.Node] = []
        self._exits: list[fx.Node] = []
        # Names of the operations before which strides were restored, with counts.
        self.stops: Counter[str] = Counter()
        # Values and arguments from Dynamo.
        self._value = {node: value_of(node) for node in graph.nodes}
        self._arguments = {node: (node.args, node.kwargs) for node in graph.nodes}
        self._written = {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}
        # Nodes whose strides differ from the model's, and nodes that share memory with other values than in the model.
        self._moved: set[fx.Node] = set()
        self._shares: set[fx.Node] = set()
        self._channels_last: dict[fx.Node, fx.Node] = {}
        # Restored nodes; the flag tells whether the node is a view of its restored source.
        self._restored: dict[tuple[fx.Node, bool], fx.Node] = {}

    def run(self, convolutions: Sequence[fx.Node]) -> list[str]:
        """Rewrite the graph; return a reason for every convolution that was not converted."""
        obstacles = {node: self._obstacle(node) for node in convolutions}
        able = [node for node, reason in obstacles.items() if reason is None]
        regions = self._regions(able)
        chosen = {node for region in regions if len(region) >= FEWEST_CONVOLUTIONS for node in region}
        reasons = [reason or ALONE for node, reason in obstacles.items() if node not in chosen]
        wanted = self._wanted(chosen)
        self._enter(wanted, chosen)
        for node in list(self.graph.nodes):
            if node in chosen:
                reason = self._convolve(node)
                reasons += [reason] if reason is not None else []
            elif node.op == "output":
                self._leave(node, self._moved | self._shares, shared=True)
            elif node in wanted and _packs(node) and not self._is_written(node.args[0]):
                self._pack(node)
            elif any(source in self._moved for source in node.all_input_nodes):
                self._follow(node, node in wanted)
            elif self._is_view(node) and any(source in self._shares for source in node.all_input_nodes):
                if self._can_follow(node):
                    self._shares.add(node)
                else:
                    self._stop(node)
        for node in convolutions:
            if node in chosen:
                self._pin(node)
        self._sweep()
        return reasons

    @property
    def entered(self) -> int:
        """The number of conversions of values that enter regions."""
        return len(self._entries)

    @property
    def left(self) -> int:
        return len(self._exits)

    # --- candidates ---

    def _obstacle(self, node: fx.Node) -> str | None:
        x, weight = _operands(node)
        values = [self._value.get(part) for part in (x, weight, node) if isinstance(part, fx.Node)]
        if len(values) < 3 or not all(isinstance(value, torch.Tensor) for value in values):
            return "nothing is known about its shapes"
        if self._value[x].dim() != self._value[weight].dim():
            return NO_BATCH
        if argument(node, 6, "groups", 1) != 1:
            return GROUPED
        if self._value[x].dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{self._value[x].dtype} has no channels-last convolution"
        if (
            self._value[x].device.type == "cuda"
            and self._value[x].dtype == torch.float32
            and not compat.inductor.allows_tf32()
        ):
            return NO_TENSOR_CORES
        if any(self._is_written(part) for part in (x, weight, node)):
            return WRITTEN
        return None

    def _is_written(self, node: fx.Node) -> bool:
        return bool(self._storages([node]) & self._written)

    def _storages(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {tensor.untyped_storage()._cdata for node in nodes for tensor in tensors_of(self._value.get(node))}

    def _can_follow(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or node.target not in FOLLOWERS:
            return False
        if mutated_arguments(node) or self._is_written(node):
            return False
        if node.target in DROPOUTS and argument(node, 2, "training", node.kwargs.get("train", True)) is not False:
            # Random numbers are assigned in memory order.
            return False
        # `x.view(dtype)` reinterprets bits.
        return not (node.target == "view" and any(isinstance(arg, torch.dtype) for arg in node.args))

    def _carries(self, node: fx.Node) -> bool:
        """Return True if an operation returns images or videos and does not depend on strides."""
        value = self._value.get(node)
        return isinstance(value, torch.Tensor) and value.dim() in FORMATS and self._can_follow(node)

    def _regions(self, convolutions: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Return groups of convolutions connected, in any direction, by operations that keep a format."""
        seeds = set(convolutions)
        inside = dict.fromkeys(convolutions) | dict.fromkeys(node for node in self.graph.nodes if self._carries(node))
        leader: dict[fx.Node, fx.Node] = {node: node for node in inside}

        def find(node: fx.Node) -> fx.Node:
            while leader[node] is not node:
                leader[node] = leader[leader[node]]
                node = leader[node]
            return node

        for node in inside:
            data = _operands(node)[:1] if node in seeds else node.all_input_nodes
            for source in data:
                if source in inside:
                    leader[find(node)] = find(source)
        regions: dict[fx.Node, list[fx.Node]] = {}
        for node in convolutions:
            regions.setdefault(find(node), []).append(node)
        return list(regions.values())

    def _wanted(self, chosen: set[fx.Node]) -> set[fx.Node]:
        """Return the operations whose results reach a convolution as images or videos."""
        wanted: set[fx.Node] = set()
        stack = [_operands(node)[0] for node in chosen]
        while stack:
            node = stack.pop()
            if node not in wanted and self._carries(node):
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        return wanted

    def _enter(self, wanted: set[fx.Node], chosen: set[fx.Node]) -> None:
        """Convert the inputs of operations on the way to a convolution once, instead of each of their results."""
        first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        for node in list(self.graph.nodes):
            if node in wanted or node in chosen or not is_contiguous(self._value[node]) or self._is_written(node):
                continue
            readers = [user for user in node.users if user in wanted and self._reads_picture(user, node)]
            if not readers:
                continue
            value = self._value[node]
            place = first if node.op in ("placeholder", "get_attr") else node.next
            made = self._written_down(node, place, readers[0])
            self._value[made], self._arguments[made] = value, (made.args, made.kwargs)
            self._restored |= {(made, False): node, (made, True): node}
            self._moved.add(made)
            self._inserted.append(made)
            self._entries.append(made)
            self._channels_last[node] = made
            for reader in readers:
                reader.replace_input_with(node, made)

    def _reads_picture(self, node: fx.Node, source: fx.Node) -> bool:
        """Return True if an operation turns an image or video into another one with as many channels."""
        value, result = self._value[source], self._value[node]
        if value.dim() not in FORMATS or value.dim() != result.dim() or node.target in JOINS:
            return False
        pixels = any(not same_size(size, 1) for size in value.shape[2:])
        return pixels and not same_size(value.shape[1], 1) and same_size(value.shape[1], result.shape[1])

    # --- the walk ---

    def _convolve(self, node: fx.Node) -> str | None:
        x, weight = _operands(node)
        swap = {x: self._as_channels_last(x, node), weight: self._weight(weight, node)}
        made = self._compute(node, swap)
        if made is None:
            return self._give_up(node, NOT_FOLLOWED)
        if not same_layout(made, self._value[node]) and not is_contiguous(self._value[node]):
            return self._give_up(node, NOT_RESTORABLE)
        self._take(node, swap, made)
        return None

    def _give_up(self, node: fx.Node, reason: str) -> str:
        self._stop(node)
        return reason

    def _follow(self, node: fx.Node, wanted: bool) -> None:
        tensors = tensors_of(self._value[node])
        if not tensors and (node.target in QUERIES or node.target is getattr):
            return
        if not tensors or not self._can_follow(node):
            self._stop(node)
            return
        mates = self._mates(node)
        if mates and not wanted:
            # No convolution reads the result: restore this input once, instead of converting the others and the result.
            self._stop(node)
            return
        swap = {mate: self._as_channels_last(mate, node) for mate in mates}
        if node.target == "view":
            # reshape returns the same view if the strides allow it, and a copy instead of an error otherwise.
            node.target = "reshape"
        made = self._compute(node, swap)
        if made is None:
            self._stop(node)
            return
        self._take(node, swap, made)

    def _pack(self, node: fx.Node) -> None:
        """Replace a call of `contiguous` on the way to a convolution by one with the channels-last format."""
        node.args, node.kwargs = node.args[:1], {"memory_format": FORMATS[self._value[node].dim()]}
        made = self._compute(node, {})
        assert made is not None
        self._take(node, {}, made)

    def _mates(self, node: fx.Node) -> list[fx.Node]:
        """Return inputs of other formats that an operation combines elementwise with a channels-last one."""
        result = self._value[node]
        if not isinstance(result, torch.Tensor) or result.dim() not in FORMATS:
            return []
        joins = node.target in JOINS
        full = [
            source
            for source in node.all_input_nodes
            if isinstance(value := self._value[source], torch.Tensor)
            and value.dim() == result.dim()
            and (joins or same_shape(value.shape, result.shape))
        ]
        if not any(source in self._moved and is_channels_last(value_of(source)) for source in full):
            return []
        mates = [source for source in full if source not in self._moved and not is_channels_last(value_of(source))]
        return mates if not any(map(self._is_written, mates)) else []

    def _compute(self, node: fx.Node, swap: dict[fx.Node, fx.Node]) -> Any:
        """Compute a node's result for its new inputs; return None if more than strides differ from before."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: value_of(swap.get(source, source)))
        try:
            with as_dynamo_does(self._value[node]):
                if node.op == "call_method":
                    made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    made = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError):
            return None
        return made if same_kind(made, self._value[node]) else None

    def _take(self, node: fx.Node, swap: dict[fx.Node, fx.Node], made: Any) -> None:
        for source, other in swap.items():
            node.replace_input_with(source, other)
        node.meta = {**node.meta, "example_value": made}
        if not same_layout(made, self._value[node]):
            self._moved.add(node)
        view = self._is_view(node)
        away = any(source in self._moved or source in self._shares for source in node.all_input_nodes)
        if (view and away) or view != bool(storages([node]) & storages(node.all_input_nodes)):
            self._shares.add(node)

    def _is_view(self, node: fx.Node) -> bool:
        """Return True if the model's value is a view of an input."""
        # Nodes inserted by this pass are copies and have no entry.
        sources = self._arguments.get(node, ())
        return bool(self._storages([node]) & self._storages(_nodes_in(sources)))

    # --- conversions ---

    def _insert(self, place: fx.Node, source: fx.Node, method: str, memory_format: torch.memory_format) -> fx.Node:
        with self.graph.inserting_before(place):
            made = self.graph.call_method(method, (source,), {"memory_format": memory_format})
        value = value_of(source)
        with as_dynamo_does(value):
            made.meta["example_value"] = getattr(value, method)(memory_format=memory_format)
        made.meta |= _origin(place)
        self._inserted.append(made)
        return made

    def _written_down(self, source: fx.Node, place: fx.Node, origin: fx.Node) -> fx.Node:
        """Insert a channels-last copy of a value."""
        with self.graph.inserting_before(place):
            made = self.graph.call_function(CHANNELS_LAST, (source,))
        value = value_of(source)
        with as_dynamo_does(value):
            made.meta["example_value"] = CHANNELS_LAST(value)
        made.meta |= _origin(origin)
        return made

    def _as_channels_last(self, node: fx.Node, place: fx.Node) -> fx.Node:
        value = value_of(node)
        if is_channels_last(value):
            return node
        if node not in self._channels_last:
            self._channels_last[node] = self._insert(place, node, "contiguous", FORMATS[value.dim()])
            self._entries.append(self._channels_last[node])
        return self._channels_last[node]

    def _weight(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Clone a weight as channels-last; `contiguous` would return a 1x1 kernel with its old strides."""
        if node not in self._channels_last:
            made = self._insert(place, node, "clone", FORMATS[value_of(node).dim()])
            freezing.mark(made)
            # The user may have converted it already.
            self._channels_last[node] = node if same_layout(value_of(made), value_of(node)) else made
        return self._channels_last[node]

    def _pin(self, convolution: fx.Node) -> None:
        """Copy a convolution's result in its new format if it is only read through views (video frames).

        Inductor adds the bias after the convolution and would give the sum the strides of a contiguous tensor, so every
        reader would read across them. Without a bias, the views show the convolution's result directly.
        """
        if argument(convolution, 2, "bias") is None:
            return
        last = convolution
        while len(last.users) == 1 and self._is_view(reader := next(iter(last.users))):
            last = reader
        readers = list(last.users)
        if last is convolution or last not in self._moved or not is_channels_last(value_of(last)):
            return
        made = self._written_down(last, last.next, last)
        for reader in readers:
            reader.replace_input_with(last, made)

    def _sweep(self) -> None:
        """Remove conversions for convolutions that were given up."""
        for node in reversed(self._inserted):
            if not node.users:
                self.graph.erase_node(node)
        self._entries = [node for node in self._entries if not node._erased]
        self._exits = [node for node in self._exits if not node._erased]

    def _stop(self, node: fx.Node) -> None:
        """End the region before a node: restore the strides of its inputs."""
        view = self._is_view(node)
        self._leave(node, self._moved | self._shares if view else self._moved, shared=view)

    def _leave(self, node: fx.Node, which: Collection[fx.Node], *, shared: bool = False) -> None:
        """Restore the original strides, and the original sharing of memory, of some inputs of a node."""
        sources = [source for source in node.all_input_nodes if source in which]
        for source in sources:
            node.replace_input_with(source, self._restore(source, node, shared))
        if sources:
            self.stops[_name(node)] += 1

    def _restore(self, node: fx.Node, place: fx.Node, shared: bool) -> fx.Node:
        if node not in self._moved and not (shared and node in self._shares):
            return node
        view = shared and self._is_view(node)
        if (node, view) not in self._restored:
            order = None if view else order_in_memory(self._value[node])
            if order is not None:
                made = self._packed_in(order, node, place)
                self._exits.append(made)
            else:
                made = self._repeat(node, place, shared)
            self._restored[node, view] = made
        return self._restored[node, view]

    def _packed_in(self, order: Sequence[int], node: fx.Node, place: fx.Node) -> fx.Node:
        """Insert a copy whose dims have the given order in memory."""
        if list(order) == sorted(order):
            return self._insert(place, node, "clone", torch.contiguous_format)
        inserted = self._transposed(node, order, place)
        inserted = self._insert(place, inserted, "clone", torch.contiguous_format)
        return self._transposed(inserted, [list(order).index(dim) for dim in range(len(order))], place)

    def _transposed(self, node: fx.Node, order: Sequence[int], place: fx.Node) -> fx.Node:
        with self.graph.inserting_before(place):
            made = self.graph.call_method("permute", (node, *order))
        value = value_of(node)
        with as_dynamo_does(value):
            made.meta["example_value"] = value.permute(*order)
        made.meta |= _origin(place)
        self._inserted.append(made)
        return made

    def _repeat(self, node: fx.Node, place: fx.Node, shared: bool) -> fx.Node:
        """Insert the node again with restored inputs, such as a transposed view of a value."""
        args, kwargs = fx.map_arg(self._arguments[node], lambda source: self._restore(source, place, shared))
        with self.graph.inserting_before(place):
            made = self.graph.create_node(node.op, node.target, args, kwargs)
        made.meta = {**node.meta, "example_value": self._value[node]}
        return made


def _origin(node: fx.Node) -> dict[str, Any]:
    return {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}


def _operands(node: fx.Node) -> tuple[Any, Any]:
    return argument(node, 0, "input"), argument(node, 1, "weight")


def _packs(node: fx.Node) -> bool:
    return node.target == "contiguous" and (
        argument(node, 1, "memory_format", torch.contiguous_format) is torch.contiguous_format
    )


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(arguments, note)
    return found


def _name(node: fx.Node) -> str:
    return "output" if node.op == "output" else str(getattr(node.target, "__name__", node.target))
