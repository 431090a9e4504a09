"""Replace a site by an op.

Before:  x' = x + gate * y; ...; n = layer_norm(x'); m = n * (1 + scale) + shift; readers of x', in between and after
After:   x', m = tritium::<op>(...), at the place of the last value; readers of x' in between are moved behind it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat.operators import is_erased
from tritium.fusions import Call, Match
from tritium.fusions.expression import Expr
from tritium.graph import mutated_arguments, same_shape, value_of
from tritium.ops import Op

DEPENDS_ON_ITSELF = "an argument of the op depends on one of its results"
EFFECTS_BETWEEN = "something between the values of the region writes to memory or has another effect"


def decline(match: Match) -> str | None:
    """Return why the values of a match are not computed together in one place, or None."""
    waiting = _waiting(match)
    if any(node in waiting for node in match.inputs):
        return DEPENDS_ON_ITSELF
    node = min(match.values)
    while waiting and node is not _last(match):
        # Nodes moved behind a write would read other values.
        if mutated_arguments(node) and node not in match.writes:
            return EFFECTS_BETWEEN
        node = node.next
    return None


def _last(match: Match) -> fx.Node:
    return max(match.values)


def _waiting(match: Match) -> list[fx.Node]:
    """Return the nodes before the last value that depend on an earlier one and must be moved, in order."""
    last = _last(match)
    late: set[fx.Node] = {value for value in match.values if value is not last}
    waiting = []
    node = min(match.values)
    while node is not last:
        if node not in late and any(needed in late for needed in node.all_input_nodes):
            late.add(node)
            waiting.append(node)
        node = node.next
    return waiting


def replace(match: Match, arguments: Mapping[str, Any], target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Compute the values of a match by calling `target` with arguments and options."""
    graph, root = match.root.graph, match.root
    if is_erased(root) or not any(value.users for value in match.values):
        # A larger region has already replaced this site.
        erase(match)
        return
    waiting = _waiting(match)
    place = match.writes[-1].next if match.writes and not match.outputs else _last(match)
    with graph.inserting_before(place):
        given = tuple(as_node(graph, value) for value in arguments.values())
        made = graph.call_function(target, given, dict(options))
        results = [made]
        if match.outputs:
            places = [index for index, value in enumerate(match.outputs) if value is not None]
            results = [graph.call_function(operator.getitem, (made, index)) for index in places]
        if match.shown:
            results = [graph.call_method(match.shown[0], (result, *match.shown[1:])) for result in results]
    if match.outputs:
        made.meta["example_value"] = tuple(value if value is None else value_of(value) for value in match.outputs)
    for value, result in zip(match.values, results, strict=True):
        result.meta = dict(value.meta)
        # Nodes that read a tensor before it is complete, such as writes to it, keep reading the incomplete one.
        for user in list(value.users):
            if user > made or user in waiting:
                user.replace_input_with(value, result)
    for node in reversed(waiting):
        results[-1].append(node)
    erase(match)


def erase(match: Match) -> None:
    """Erase nodes that have no users after a replacement."""
    graph = match.root.graph
    for write in reversed(match.writes):
        if not is_erased(write):
            graph.erase_node(write)
    left = [node for node in match.nodes | match.inner if not is_erased(node) and node not in match.writes]
    # Nodes that were moved may stand behind their users: look for users, not at the order.
    while unused := [node for node in left if not node.users]:
        for node in unused:
            graph.erase_node(node)
        left = [node for node in left if node not in unused]


def changed_meta(match: Match, op: Op, arguments: Mapping[str, Any], *, any_layout: bool) -> str | None:
    """Return how the op's results would differ from the values they replace, or None."""
    wanted = [value_of(node) for node in match.values]
    mode = compat.tensors.fake_mode_of(wanted)
    if mode is None:
        return "nothing is known about the value's shape"
    with mode:
        made = op.fake(**{name: as_fake(value) for name, value in arguments.items()})
        results = match.read(made if isinstance(made, tuple) else (made,))
        if match.shown:
            results = tuple(getattr(result, match.shown[0])(*match.shown[1:]) for result in results)
    for result, value in zip(results, wanted, strict=True):
        if result.dtype != value.dtype:
            return f"the replacement gives {result.dtype} where the model has {value.dtype}"
        if not same_shape(result.shape, value.shape):
            return f"the replacement gives shape {tuple(result.shape)} where the model has {tuple(value.shape)}"
        if not any_layout and not same_shape(result.stride(), value.stride()):
            if op.keeps_strides:
                return "the value lies in memory in another order than the replacement's would"
            return "the value is not contiguous, and the replacement's would be"
    return None


# --- arguments of a replacement: expressions, calls, numbers ---


def _evaluate(thing: Any, held: Callable[[fx.Node], Any], viewed: Callable[[Expr], Any]) -> Any:
    """Evaluate an argument, given functions for values that a node holds and for views that no node holds."""
    if isinstance(thing, list):
        return [_evaluate(part, held, viewed) for part in thing]
    if isinstance(thing, Call):
        owner, *rest = (_evaluate(part, held, viewed) for part in thing.args)
        return getattr(owner, thing.method)(*rest)
    if not isinstance(thing, Expr):
        return thing
    return held(thing.node) if thing.node is not None else viewed(thing)


def as_fake(thing: Any) -> Any:
    """Return the fake tensor or the number of an argument."""

    def viewed(expr: Expr) -> Any:
        # The model's view of `1 + s`, evaluated on s: it has the shape of the former and the dtype of s.
        source, shown = as_fake(expr.args[0]), value_of(expr.attrs[0])
        with shown.fake_mode:
            return source.new_empty(shown.shape)

    return _evaluate(thing, value_of, viewed)


def as_value(thing: Any, environment: dict[fx.Node, Any]) -> Any:
    """Return an argument's value while the graph runs."""

    def viewed(expr: Expr) -> Any:
        view = expr.attrs[0]
        source = as_value(expr.args[0], environment)
        args, kwargs = fx.map_arg((view.args[1:], view.kwargs), lambda node: environment[node])
        if view.op == "call_method":
            return getattr(source, view.target)(*args, **kwargs)
        return view.target(source, *args, **kwargs)

    return _evaluate(thing, environment.__getitem__, viewed)


def as_node(graph: fx.Graph, thing: Any) -> Any:
    """Return an argument's node, created if necessary, or its number."""
    if isinstance(thing, list):
        return [as_node(graph, part) for part in thing]
    if isinstance(thing, Call):
        made = graph.call_method(thing.method, tuple(as_node(graph, part) for part in thing.args))
        made.meta["example_value"] = as_fake(thing)
        return made
    if not isinstance(thing, Expr):
        return thing
    if thing.node is None:
        return _repeated_view(graph, thing)
    known = thing.value
    # `dynamic=True` turns an eps into an input. It is a constant of the model: guard on it, like Inductor.
    return float(known) if isinstance(known, (torch.SymFloat, torch.SymInt)) else thing.node


def _repeated_view(graph: fx.Graph, value: Expr) -> fx.Node:
    """Insert a view on s that repeats the model's view of `1 + s`."""
    if value.op != "view" or not value.attrs:
        raise TypeError(f"no node holds {value}")
    view = value.attrs[0]
    source = as_node(graph, value.args[0])
    made = graph.create_node(view.op, view.target, (source, *view.args[1:]), dict(view.kwargs))
    fake = as_fake(value)
    made.meta = {"example_value": fake} if fake is not None else {}
    return made
