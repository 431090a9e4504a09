"""Compare a graph's inputs and outputs before and after a pass, which must preserve them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.graph import call


class ChangedInterface(Exception):
    """A pass changed a graph's inputs or outputs."""


def check_interface(before: fx.Graph, after: fx.Graph, *, adds_inputs: bool = False) -> None:
    """Raise `ChangedInterface` if inputs, or number, order, shape or dtype of outputs differ."""
    names, new_names = ([node.name for node in graph.find_nodes(op="placeholder")] for graph in (before, after))
    if names != (new_names[: len(names)] if adds_inputs else new_names):
        raise ChangedInterface(f"the graph's inputs were {', '.join(names)} and are {', '.join(new_names)}")
    old, new = _outputs(before), _outputs(after)
    if len(old) != len(new):
        raise ChangedInterface(f"the graph had {len(old)} outputs and has {len(new)}")
    remaining = {node.name for node in after.nodes}
    places = {value.name: place for place, value in enumerate(old) if isinstance(value, fx.Node)}
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if not (isinstance(was, fx.Node) and isinstance(now, fx.Node)):
            if isinstance(was, fx.Node) or isinstance(now, fx.Node) or was != now:
                raise ChangedInterface(f"output {place} was {was} and is {now}")
        elif was.name != now.name:
            if now.name in places and was.name in remaining:
                raise ChangedInterface(
                    f"output {place} was {was.name} and is {now.name}, which was output {places[now.name]}"
                )
            _compare(place, was, now)


def _outputs(graph: fx.Graph) -> list[Any]:
    nodes = list(graph.find_nodes(op="output"))
    if len(nodes) != 1:
        raise ChangedInterface(f"the graph has {len(nodes)} output nodes")
    return compat.tensors.leaves_of(nodes[0].args, is_leaf=lambda value: value is None)


def _compare(place: int, was: fx.Node, now: fx.Node) -> None:
    expected, result = was.meta.get("example_value"), _value(now)
    if not isinstance(expected, torch.Tensor):
        return
    if not isinstance(result, torch.Tensor):
        raise ChangedInterface(f"output {place} was a tensor and is a {type(result).__name__}")
    for (name, here), (_, there) in zip(_properties(expected), _properties(result), strict=True):
        if here != there:
            raise ChangedInterface(f"output {place} had {name} {here} and has {there}")


def _properties(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    # The sizes of this call, so that equal sizes with different expressions match; add no guard.
    yield "shape", [size if isinstance(size, int) else compat.dynamo.size_hint(size) for size in tensor.shape]
    yield "dtype", tensor.dtype
    yield "device", tensor.device.type


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node; compute it if a pass has not set one."""
    if "example_value" in node.meta or node.op not in ("call_function", "call_method"):
        return node.meta.get("example_value")
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    modes = [getattr(leaf, "fake_mode", None) for leaf in compat.tensors.leaves_of((args, kwargs))]
    mode = next((mode for mode in modes if mode is not None), None)
    if mode is None:
        return None
    with mode, torch.no_grad():
        return call(node, *args, **kwargs)
