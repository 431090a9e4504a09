"""Return reasons why a graph cannot be cut, or not at these places, without changing its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritium.compiler.blocks.facts import Facts
from tritium.compiler.blocks.segments import Segment
from tritium.graph import value_of

_ENTERS = "_enter_autocast"
_EXITS = "_exit_autocast"

# The types of values that pieces can exchange.
_PASSED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def of_graph(graph: fx.Graph) -> str | None:
    """Return why a graph cannot be cut anywhere, or None."""
    for node in graph.find_nodes(op="placeholder"):
        value: Any = value_of(node)
        if is_traceable_wrapper_subclass(value):
            return f"{node.name} is a {type(value).__name__}: tensor subclasses are compiled whole"
    modes = ("_set_grad_enabled", "_enter_inference_mode", "set_default_dtype")
    found = next((node for node in graph.nodes if getattr(node.target, "__name__", "") in modes), None)
    return f"it switches a mode inside ({found.name})" if found is not None else None


def of_cut(segments: Sequence[Segment], facts: Facts) -> str | None:
    """Return why a graph cannot be cut into these segments, or None."""
    return _mode_across(segments) or _passed(segments, facts) or _shared_and_written(segments, facts)


def writes_to_inputs(segment: Segment, facts: Facts) -> bool:
    """Return whether a segment writes to an input of the whole graph: compiling it then adds guards."""
    return not facts.of_inputs.isdisjoint(facts.written_by(segment.nodes))


def _mode_across(segments: Sequence[Segment]) -> str | None:
    for segment in segments:
        names = [getattr(node.target, "__name__", "") for node in segment.nodes]
        if names.count(_ENTERS) != names.count(_EXITS):
            return "an autocast region begins in one piece and ends in another"
    return None


def _passed(segments: Sequence[Segment], facts: Facts) -> str | None:
    for node in {node: None for segment in segments for node in segment.inputs}:
        value = value_of(node)
        if not isinstance(value, _PASSED):
            return f"{node.name} would be passed between pieces, and is a {type(value).__name__}"
        if not isinstance(value, torch.SymFloat) and any(name not in facts.sizes for name in facts.symbols[node]):
            return f"the size of {node.name} is not the value of any input"
    return None


def _shared_and_written(segments: Sequence[Segment], facts: Facts) -> str | None:
    """Return how a write could be lost between values that share memory, or None."""
    if not facts.written:
        return None
    written = [facts.written_by(segment.nodes) for segment in segments]
    for place, segment in enumerate(segments):
        if (pair := _pair(segment.inputs, written[place], facts)) is not None:
            return f"a piece writes to memory that two of its inputs share ({pair})"
        # Compiled code restores results that are views of inputs; a view of another result may become a separate tensor.
        later: set[int] = set().union(*written[place + 1 :]) - facts.memory_of(segment.inputs)
        if (pair := _pair(segment.outputs, later, facts)) is not None:
            return f"memory that two results of a piece share is written to later ({pair})"
    return None


def _pair(nodes: Sequence[fx.Node], written: set[int], facts: Facts) -> str | None:
    seen: dict[int, fx.Node] = {}
    for node in nodes:
        for storage in facts.storages[node] & written:
            if seen.setdefault(storage, node) is not node:
                return f"{seen[storage].name} and {node.name}"
    return None
