"""Compare a graph's inputs and outputs before and after a pass, which must preserve them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tritium import compat


class ChangedInterface(Exception):
    """A pass changed a graph's inputs or outputs."""


def check_interface(before: fx.Graph, after: fx.Graph) -> None:
    """Raise `ChangedInterface` if inputs, or number, order, shape or dtype of outputs differ."""
    names = [[node.name for node in graph.nodes if node.op == "placeholder"] for graph in (before, after)]
    if names[0] != names[1]:
        raise ChangedInterface(f"the graph's inputs were {', '.join(names[0])} and are {', '.join(names[1])}")
    old, new = _outputs(before), _outputs(after)
    if len(old) != len(new):
        raise ChangedInterface(f"the graph had {len(old)} outputs and has {len(new)}")
    kept = {node.name for node in after.nodes}
    places = {value.name: place for place, value in enumerate(old) if isinstance(value, fx.Node)}
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if not (isinstance(was, fx.Node) and isinstance(now, fx.Node)):
            if isinstance(was, fx.Node) or isinstance(now, fx.Node) or was != now:
                raise ChangedInterface(f"output {place} was {was} and is {now}")
            continue
        if was.name == now.name:
            continue
        if now.name in places and was.name in kept:
            raise ChangedInterface(
                f"output {place} was {was.name} and is {now.name}, which was output {places[now.name]}"
            )
        _compare(place, was, now)


def _outputs(graph: fx.Graph) -> list[Any]:
    found = [node for node in graph.nodes if node.op == "output"]
    if len(found) != 1:
        raise ChangedInterface(f"the graph has {len(found)} output nodes")
    leaves: list[Any] = pytree.tree_leaves(found[0].args, is_leaf=lambda value: value is None)
    return leaves


def _compare(place: int, was: fx.Node, now: fx.Node) -> None:
    expected, found = was.meta.get("example_value"), _value(now)
    if not isinstance(expected, torch.Tensor):
        return
    if not isinstance(found, torch.Tensor):
        raise ChangedInterface(f"output {place} was a tensor and is a {type(found).__name__}")
    for what, here, there in _properties(expected, found):
        if here != there:
            raise ChangedInterface(f"output {place} had {what} {here} and has {there}")


def _properties(expected: torch.Tensor, found: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    yield "shape", _sizes(expected), _sizes(found)
    yield "dtype", expected.dtype, found.dtype
    yield "device", expected.device.type, found.device.type


def _sizes(tensor: torch.Tensor) -> list[int | None]:
    """Return the sizes of this call, so that equal sizes with different expressions match; add no guard."""
    return [size if isinstance(size, int) else compat.dynamo.size_hint(size) for size in tensor.shape]


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node; compute it if a pass has not set one."""
    if "example_value" in node.meta or node.op not in ("call_function", "call_method"):
        return node.meta.get("example_value")
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    mode = next((mode for fake in fakes if (mode := getattr(fake, "fake_mode", None)) is not None), None)
    if mode is None:
        return None
    target: Any = node.target if callable(node.target) else getattr(torch.Tensor, str(node.target))
    with mode, torch.no_grad():
        return target(*args, **kwargs)
