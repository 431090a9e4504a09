"""Evaluate arguments of a replacement (expressions, calls, numbers) to nodes, fake tensors or values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tritium.fusions import Call
from tritium.fusions.expression import Expr
from tritium.graph import value_of


def evaluate(thing: Any, held: Callable[[fx.Node], Any], viewed: Callable[[Expr], Any]) -> Any:
    """Evaluate an argument, given functions for values that a node holds and for views that no node holds."""
    if isinstance(thing, list):
        return [evaluate(part, held, viewed) for part in thing]
    if isinstance(thing, Call):
        owner, *rest = (evaluate(part, held, viewed) for part in thing.args)
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

    return evaluate(thing, value_of, viewed)


def as_value(thing: Any, environment: dict[fx.Node, Any]) -> Any:
    """Return an argument's value while the graph runs."""

    def viewed(expr: Expr) -> Any:
        view = expr.attrs[0]
        source = as_value(expr.args[0], environment)
        args, kwargs = fx.map_arg((view.args[1:], view.kwargs), lambda node: environment[node])
        if view.op == "call_method":
            return getattr(source, view.target)(*args, **kwargs)
        return view.target(source, *args, **kwargs)

    return evaluate(thing, environment.__getitem__, viewed)


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
