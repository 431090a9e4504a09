"""Freeze values that depend only on parameters: compute them when these change, not on every call.

Before:  f(x, weight):  cat = torch.cat([weight, ...]); return x @ cat.t()
After:   f(x, weight, cat): return x @ cat.t()          with cat = frozen(weight) kept with the compiled code

Frozen values are inputs of the compiled graph and not constants, so that equal blocks can share one graph. A changed
parameter is detected by its identity, storage and version counter, and by a count of PEFT's merges, which write through
`.data`. Other writes through `.data` are not detected.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compat.peft import MERGES
from tritium.graph import call, mutated_arguments, storages, value_of
from tritium.report.records import Frozen

NAME = "freezing"

# The start of the names of inputs that are frozen values.
PREFIX = "frozen_"

# Marks a node that is frozen regardless of the configuration.
_MARK = "tritium_freeze"

# Counts changes of inputs of frozen values other than parameters.
_change = 0


def forget() -> None:
    """Compute all frozen values again at their next use: an input that is not a parameter has changed."""
    global _change  # noqa: PLW0603 - a count of this process
    _change += 1


UNTRACKED = "an inference tensor has no version counter: a change could not be seen"


def mark(node: fx.Node) -> None:
    """Freeze a value even without `enable_freezing`, because it only rearranges its parameter."""
    node.meta[_MARK] = True


def marked(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.meta.get(_MARK)]


@dataclass
class _Entry:
    sources: list[weakref.ref[torch.Tensor]]
    # Keep the storages' ids from being reused.
    storages: list[Any]
    stamp: tuple[Any, ...]
    values: tuple[torch.Tensor, ...]


class FrozenValues:
    """Frozen values for every set of parameters that the compiled graph is called with."""

    def __init__(self, program: fx.GraphModule) -> None:
        self.program = program
        self._entries: dict[tuple[int, ...], _Entry] = {}

    def of(self, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        key = tuple(map(id, sources))
        stamp = (MERGES.now(), _change, *map(_stamp, sources))
        entry = self._entries.get(key)
        if (
            entry is not None
            and entry.stamp == stamp
            and all(ref() is source for ref, source in zip(entry.sources, sources, strict=True))
        ):
            return entry.values
        # Never create inference tensors: the values outlive the caller's mode, and version counters must track them.
        with torch.inference_mode(False), torch.no_grad():
            values = tuple(self.program(*sources))

        def forget(_: Any) -> None:
            self._entries.pop(key, None)

        references = [weakref.ref(source, forget) for source in sources]
        self._entries[key] = _Entry(references, list(map(compat.tensors.keep_storage_id, sources)), stamp, values)
        return values


def _stamp(tensor: torch.Tensor) -> tuple[int, ...]:
    return compat.tensors.version_of(tensor), compat.tensors.storage_id(tensor), tensor.data_ptr()


@dataclass
class FrozenPart:
    """The parameter-only part of a graph, removed from it."""

    values: FrozenValues
    source_indices: list[int]
    # Dynamo's fake values: real tensors that are new to Dynamo would get symbolic sizes that no guard can name.
    example_values: list[Any]

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph so that it gets its frozen values on every call."""

        def call_frozen(*args: Any) -> Any:
            frozen = self.values.of([args[index] for index in self.source_indices])
            return compiled(*args, *frozen)

        return call_frozen


def freeze(
    graph: fx.Graph, example_inputs: Sequence[Any], only: Collection[fx.Node] | None = None
) -> tuple[FrozenPart | None, list[Frozen]]:
    """Remove the parameter-only part of a graph, or only the values in `only`, in place.

    Returns that part, and entries for the report.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs = dict(zip(placeholders, example_inputs, strict=True))
    pure = _computed_from_parameters(graph, placeholders)
    returned = storages([source for output in graph.find_nodes(op="output") for source in output.all_input_nodes])
    entries: list[Frozen] = []
    frontier = []
    for node in pure if only is None else [node for node in pure if node in only]:
        value = value_of(node)
        # A view is free and always shows its parameter's current data.
        is_view = bool(storages([node]) & storages(placeholders))
        if is_view or not isinstance(value, torch.Tensor) or all(user in pure for user in node.users):
            continue
        _, sources = _upstream([node], pure)
        reason = _decline(node, [inputs[source] for source in sources], returned)
        names = tuple(map(compat.dynamo.source_name, sources))
        entries.append(Frozen(node.name, names, value.numel() * value.element_size() if reason is None else 0, reason))
        if reason is None:
            frontier.append(node)
    return _take_out(graph, frontier, pure, inputs) if frontier else None, entries


def _computed_from_parameters(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return nodes computed only from parameters, without random numbers or writes in place, in order."""
    written = {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}
    sources = {node for node in placeholders if compat.dynamo.is_parameter_placeholder(node)}
    sources = {node for node in sources if not storages([node]) & written}
    pure: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
            continue
        if not all(source in sources or source in pure for source in node.all_input_nodes):
            continue
        if not mutated_arguments(node) and not storages([node]) & written and _is_pure(node):
            pure[node] = None
    return pure


def _is_pure(node: fx.Node) -> bool:
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    mode = compat.tensors.fake_mode_of((args, kwargs))
    if mode is None:
        return False
    with mode:
        return compat.traced.is_pure(functools.partial(call, node), args, kwargs)


def _upstream(nodes: Iterable[fx.Node], pure: Collection[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Return the nodes in `pure` that some nodes are computed by, with these, and the parameters that they read."""
    needed: set[fx.Node] = set()
    sources: dict[fx.Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        for source in node.all_input_nodes:
            if source in pure:
                stack.append(source)
            else:
                sources[source] = None
    return needed, list(sources)


def _decline(node: fx.Node, parameters: Sequence[Any], returned: set[int]) -> str | None:
    """Return why a value is not frozen, or None."""
    if storages([node]) & returned:
        return "it is returned, and the caller may write to it"
    for tensor in parameters:
        if isinstance(tensor, torch.Tensor) and tensor.is_inference():
            return UNTRACKED
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"its parameter is a {type(tensor).__name__}, whose changes cannot be seen"
    if any(not isinstance(size, int) for size in value_of(node).shape):
        return "its shape is symbolic"
    return None


def _take_out(
    graph: fx.Graph, frontier: Sequence[fx.Node], pure: dict[fx.Node, None], inputs: dict[fx.Node, Any]
) -> FrozenPart:
    """Move the computation of the frontier to a separate program, and replace its values by inputs."""
    needed, sources = _upstream(frontier, pure)
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {source: program.placeholder(source.name) for source in sources}
    for node in pure:
        if node in needed:
            copies[node] = program.node_copy(node, copies.__getitem__)
    program.output(tuple(copies[node] for node in frontier))
    values = FrozenValues(fx.GraphModule(torch.nn.Module(), program))
    # Run now, so that a failure disables freezing instead of failing the first call.
    try:
        values.of([inputs[source] for source in sources])
    except torch.OutOfMemoryError as error:
        # The model may run without frozen values.
        raise MemoryError(f"frozen values need more memory: {error}") from error
    last = list(inputs)[-1]
    for node in frontier:
        with graph.inserting_after(last):
            last = graph.placeholder(f"{PREFIX}{node.name}")
        last.meta = {"example_value": value_of(node)}
        compat.dynamo.describe_new_input(last, is_static=True)
        node.replace_all_uses_with(last)
    example_values = [value_of(node) for node in frontier]
    for node in reversed(list(pure)):
        if not node.users:
            graph.erase_node(node)
    places = {node: place for place, node in enumerate(inputs)}
    return FrozenPart(values, [places[source] for source in sources], example_values)
