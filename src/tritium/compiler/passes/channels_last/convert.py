"""Convert the nodes of channels-last regions, in one walk from a graph's inputs to its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium.compiler.passes.channels_last import region
from tritium.compiler.passes.channels_last.border import Border
from tritium.compiler.passes.channels_last.region import JOINS, QUERIES, Model, operands
from tritium.compiler.passes.channels_last.strides import (
    as_dynamo_does,
    is_channels_last,
    is_contiguous,
    same_meta,
    same_strides,
)
from tritium.graph import argument, call, same_shape, storages, tensors_of, value_of
from tritium.ops.memory_format import FORMATS

NOT_FOLLOWED = "its result is not the one Dynamo saw (autocast?), so its layout cannot be followed"
NOT_RESTORABLE = "the model gives its result strides that could not be restored"


class Converter:
    """The conversion of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.model = Model(graph)
        self.border = Border(graph, self.model)

    def run(self, convolutions: Sequence[fx.Node]) -> list[str]:
        """Convert the graph; return a reason for every convolution that was not converted."""
        model, border = self.model, self.border
        chosen, reasons = region.choose(model, convolutions)
        upstream = region.upstream(model, chosen)
        for node, readers in region.entries(model, chosen, upstream):
            border.enter(node, readers)
        for node in list(self.graph.nodes):
            if node in chosen:
                reason = self._convolution(node)
                reasons += [reason] if reason is not None else []
            elif node.op == "output":
                border.restore_inputs(node)
            elif node in upstream and _is_contiguous_call(node) and not model.is_written(node.args[0]):
                self._contiguous(node)
            elif any(source in border.converted for source in node.all_input_nodes):
                self._reader(node, is_upstream=node in upstream)
            elif model.is_view(node) and any(source in border.realiased for source in node.all_input_nodes):
                if model.is_agnostic(node):
                    border.realiased.add(node)
                else:
                    border.restore_inputs(node)
        for node in convolutions:
            if node in chosen:
                self._copy_behind_views(node)
        border.remove_unused()
        return reasons

    def _convolution(self, node: fx.Node) -> str | None:
        """Convert a convolution; return the reason if its result cannot be channels-last."""
        x, weight = operands(node)
        swap = {x: self.border.channels_last(x, node), weight: self.border.weight(weight, node)}
        value = self._compute(node, swap)
        reason = None
        if value is None:
            reason = NOT_FOLLOWED
        elif not same_strides(value, self.model.values[node]) and not is_contiguous(self.model.values[node]):
            reason = NOT_RESTORABLE
        if reason is not None:
            self.border.restore_inputs(node)
        else:
            self._replace_inputs(node, swap, value)
        return reason

    def _contiguous(self, node: fx.Node) -> None:
        """Replace a call of `contiguous` on the way to a convolution by one with the channels-last format."""
        node.args, node.kwargs = node.args[:1], {"memory_format": FORMATS[self.model.values[node].dim()]}
        self._replace_inputs(node, {}, self._compute(node, {}))

    def _reader(self, node: fx.Node, *, is_upstream: bool) -> None:
        """Let an operation read channels-last inputs, or restore them if its result depends on strides."""
        tensors = list(tensors_of(self.model.values[node]))
        if not tensors and (node.target in QUERIES or node.target is getattr):
            return
        others = self._inputs_to_convert(node) if tensors and self.model.is_agnostic(node) else None
        # If no convolution reads the result, restoring this input costs less than converting the others and the result.
        if others is None or (others and not is_upstream):
            self.border.restore_inputs(node)
            return
        swap = {other: self.border.channels_last(other, node) for other in others}
        if node.target == "view":
            # reshape returns the same view if the strides allow it, and a copy instead of an error otherwise.
            node.target = "reshape"
        value = self._compute(node, swap)
        if value is None:
            self.border.restore_inputs(node)
        else:
            self._replace_inputs(node, swap, value)

    def _inputs_to_convert(self, node: fx.Node) -> list[fx.Node]:
        """Return inputs of other formats that an operation combines elementwise with a channels-last one."""
        result = self.model.values[node]
        if not isinstance(result, torch.Tensor) or result.dim() not in FORMATS:
            return []
        combined = [
            source
            for source in node.all_input_nodes
            if isinstance(value := self.model.values[source], torch.Tensor)
            and value.dim() == result.dim()
            and (node.target in JOINS or same_shape(value.shape, result.shape))
        ]
        converted = [source for source in combined if source in self.border.converted]
        if not any(is_channels_last(value_of(source)) for source in converted):
            return []
        others = [source for source in combined if source not in converted and not is_channels_last(value_of(source))]
        return others if not any(map(self.model.is_written, others)) else []

    def _compute(self, node: fx.Node, swap: Mapping[fx.Node, fx.Node]) -> Any:
        """Compute a node's result for its new inputs; return None if more than strides differ from before."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: value_of(swap.get(source, source)))
        try:
            with as_dynamo_does(self.model.values[node]):
                value = call(node, *args, **kwargs)
        except (RuntimeError, TypeError):
            return None
        return value if same_meta(value, self.model.values[node]) else None

    def _replace_inputs(self, node: fx.Node, swap: Mapping[fx.Node, fx.Node], value: Any) -> None:
        """Replace inputs of a node, and note how its new value differs from the model's."""
        for source, other in swap.items():
            node.replace_input_with(source, other)
        node.meta = {**node.meta, "example_value": value}
        if not same_strides(value, self.model.values[node]):
            self.border.converted.add(node)
        changed = self.border.converted | self.border.realiased
        was_view, is_view = self.model.is_view(node), bool(storages([node]) & storages(node.all_input_nodes))
        if was_view != is_view or (was_view and any(source in changed for source in node.all_input_nodes)):
            self.border.realiased.add(node)

    def _copy_behind_views(self, convolution: fx.Node) -> None:
        """Copy a convolution's result in its new format if it is only read through views (video frames).

        Inductor adds the bias after the convolution and would give the sum the strides of a contiguous tensor, so every
        reader would read across them. Without a bias, the views show the convolution's result directly.
        """
        if argument(convolution, 2, "bias") is None:
            return
        last = convolution
        while len(last.users) == 1 and self.model.is_view(reader := next(iter(last.users))):
            last = reader
        readers = list(last.users)
        if last is convolution or last not in self.border.converted or not is_channels_last(value_of(last)):
            return
        copy = self.border.copy(last, last.next, last)
        for reader in readers:
            reader.replace_input_with(last, copy)


def _is_contiguous_call(node: fx.Node) -> bool:
    return node.target == "contiguous" and (
        argument(node, 1, "memory_format", torch.contiguous_format) is torch.contiguous_format
    )
