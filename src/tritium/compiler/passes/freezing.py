"""Freeze values that depend only on parameters: compute them when these change, not on every call.

Before:  f(x, weight):  cat = torch.cat([weight, ...]); return x @ cat.t()
After:   f(x, weight, cat): return x @ cat.t()          with cat = fold(weight) kept with the compiled code

Frozen values are inputs of the compiled graph and not constants, so that equal blocks can share one graph. A changed
parameter is detected by its identity, storage and version counter, and by a count of PEFT's merges, which write through
`.data`. Other writes through `.data` are not detected.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tritium import compat
from tritium.graph import mutated_arguments, storages, value_of
from tritium.report import Folded

# Marks a node that is frozen regardless of the configuration.
_MARK = "tritium_fold"

UNTRACKED = "an inference tensor has no version counter: a change could not be seen"


def mark_for_folding(node: fx.Node) -> None:
    """Freeze a value even without `enable_freezing`, because it only rearranges its parameter."""
    node.meta[_MARK] = True


def marked_for_folding(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.meta.get(_MARK)]


class _ImpureError(Exception):
    """An operator gives different results on repeated runs, or writes to memory."""


class _PurityCheck(TorchDispatchMode):
    """Reject operators that use random numbers or write to memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _ImpureError(str(func))
        return func(*args, **(kwargs or {}))


class Merges:
    """Count merges by PEFT, which write into weights without changing their version counters."""

    def __init__(self) -> None:
        self.count = 0
        self._watched = False

    def now(self) -> int:
        """Return the count; increment it when peft is first found, because earlier merges were not counted."""
        if not self._watched and (module := sys.modules.get("peft.tuners.tuners_utils")) is not None:
            self._watched = True
            self.count += 1
            self._watch(module.BaseTunerLayer)
        return self.count

    def _watch(self, layer: type) -> None:
        for cls in _with_subclasses(layer):
            self._wrap(cls)
        inherited = layer.__init_subclass__

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            inherited(**kwargs)
            self._wrap(cls)

        # setattr, because mypy considers __init_subclass__ of a class to be bound.
        setattr(layer, "__init_subclass__", classmethod(init_subclass))  # noqa: B010

    def _wrap(self, cls: type) -> None:
        for name in ("merge", "unmerge"):
            original = cls.__dict__.get(name)
            if original is None or hasattr(original, "tritium_original"):
                continue

            def counted(layer: Any, *args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                try:
                    return _original(layer, *args, **kwargs)
                finally:
                    self.count += 1

            counted.tritium_original = original  # type: ignore[attr-defined]
            counted.__doc__ = original.__doc__
            setattr(cls, name, counted)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    sub: type
    for sub in cls.__subclasses__():
        yield from _with_subclasses(sub)


MERGES = Merges()


@dataclass
class _Entry:
    sources: list[weakref.ref[torch.Tensor]]
    # Weak references that keep the storages' identities from being reused.
    storages: list[StorageWeakRef]
    stamp: tuple[Any, ...]
    values: tuple[torch.Tensor, ...]


class FoldedValues:
    """Frozen values for every set of parameters that the compiled graph is called with."""

    def __init__(self, program: fx.GraphModule) -> None:
        self.program = program
        self._entries: dict[tuple[int, ...], _Entry] = {}

    def of(self, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        key = tuple(map(id, sources))
        stamp = (MERGES.now(), *((t._version, t.untyped_storage()._cdata, t.data_ptr()) for t in sources))
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

        self._entries[key] = _Entry(
            [weakref.ref(source, forget) for source in sources],
            [StorageWeakRef(source.untyped_storage()) for source in sources],
            stamp,
            values,
        )
        return values


@dataclass
class Folding:
    """The parameter-only part of a graph, with a function that computes it."""

    values: FoldedValues
    source_indices: list[int]
    # Dynamo's fake values: real tensors that are new to Dynamo would get symbolic sizes that no guard can name.
    example_values: list[Any]

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph so that it gets its frozen values on every call."""

        def call(*args: Any) -> Any:
            folded = self.values.of([args[index] for index in self.source_indices])
            return compiled(*args, *folded)

        return call


def fold_parameters(
    graph: fx.Graph, example_inputs: Sequence[Any], only: Collection[fx.Node] | None = None
) -> tuple[Folding | None, list[Folded]]:
    """Remove the parameter-only part of a graph, or only the values in `only`, in place.

    Returns that part, and entries for the report.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs = dict(zip(placeholders, example_inputs, strict=True))
    parameters = [node for node in placeholders if compat.dynamo.is_parameter_placeholder(node)]
    written = {storage for node in graph.nodes for storage in storages(mutated_arguments(node))}
    parameters = [node for node in parameters if not storages([node]) & written]
    foldable = _foldable(graph, parameters, written)
    listed: list[Folded] = []
    frontier = []
    for node in foldable if only is None else [node for node in foldable if node in only]:
        if all(user in foldable for user in node.users) or not isinstance(value_of(node), torch.Tensor):
            continue
        if storages([node]) & storages(placeholders):
            # A view is free and always shows its parameter's current data.
            continue
        reason = _reason_to_decline(graph, node, foldable, inputs)
        names = tuple(compat.dynamo.source_name(source) for source in _sources(node, foldable))
        value = value_of(node)
        listed.append(Folded(node.name, names, value.numel() * value.element_size() if reason is None else 0, reason))
        if reason is None:
            frontier.append(node)
    if not frontier:
        return None, listed
    return _take_out(graph, frontier, foldable, inputs), listed


def _foldable(graph: fx.Graph, parameters: Sequence[fx.Node], written: set[int]) -> dict[fx.Node, None]:
    """Return nodes computed only from parameters, without random numbers or writes in place, in order."""
    pure: dict[fx.Node, None] = {}
    known = set(parameters)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
            continue
        if not all(source in known for source in node.all_input_nodes):
            continue
        if mutated_arguments(node) or storages([node]) & written or not _is_pure(node):
            continue
        pure[node] = None
        known.add(node)
    return pure


def _is_pure(node: fx.Node) -> bool:
    fake_mode = next(
        (
            value.fake_mode
            for source in node.all_input_nodes
            if (value := value_of(source)) is not None and hasattr(value, "fake_mode")
        ),
        None,
    )
    if fake_mode is None:
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    try:
        with fake_mode, _PurityCheck(), torch.no_grad():  # type: ignore[no-untyped-call]
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    except _ImpureError:
        return False
    return True


def _sources(node: fx.Node, foldable: dict[fx.Node, None]) -> list[fx.Node]:
    """Return the parameters that a frozen value depends on, in order of appearance."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in foldable:
                stack.append(source)
            else:
                found[source] = None
    return list(found)


def _reason_to_decline(
    graph: fx.Graph, node: fx.Node, foldable: dict[fx.Node, None], inputs: dict[fx.Node, Any]
) -> str | None:
    returned = [source for output in graph.find_nodes(op="output") for source in output.all_input_nodes]
    if storages([node]) & storages(returned):
        return "it is returned, and the caller may write to it"
    for source in _sources(node, foldable):
        tensor = inputs[source]
        if isinstance(tensor, torch.Tensor) and tensor.is_inference():
            return UNTRACKED
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"its parameter is a {type(tensor).__name__}, whose changes cannot be seen"
    if any(not isinstance(size, int) for size in value_of(node).shape):
        return "its shape is symbolic"
    return None


def _take_out(
    graph: fx.Graph, frontier: Sequence[fx.Node], foldable: dict[fx.Node, None], inputs: dict[fx.Node, Any]
) -> Folding:
    needed = _closure(frontier, foldable)
    sources = list(dict.fromkeys(source for node in frontier for source in _sources(node, foldable)))
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {source: program.placeholder(source.name) for source in sources}
    for node in foldable:
        if node in needed:
            copies[node] = program.node_copy(node, lambda source: copies[source])
    program.output(tuple(copies[node] for node in frontier))
    values = FoldedValues(fx.GraphModule(torch.nn.Module(), program))
    example_values = [value_of(node) for node in frontier]
    # Run now, so that a failure disables freezing instead of failing the first call.
    values.of([inputs[source] for source in sources])
    placeholders = list(graph.find_nodes(op="placeholder"))
    last = placeholders[-1]
    for node in frontier:
        with graph.inserting_after(last):
            last = graph.placeholder(f"folded_{node.name}")
        last.meta = {"example_value": value_of(node)}
        compat.dynamo.describe_new_input(last, is_static=True)
        node.replace_all_uses_with(last)
    for node in reversed(list(foldable)):
        if not node.users:
            graph.erase_node(node)
    return Folding(values, [placeholders.index(source) for source in sources], example_values)


def _closure(frontier: Sequence[fx.Node], foldable: dict[fx.Node, None]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = list(frontier)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(source for source in node.all_input_nodes if source in foldable)
    return needed
