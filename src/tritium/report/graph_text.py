"""Graphs as text: one line per node, or one record per node that keeps nothing of the model alive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium.compat.operators import operator_of, qualified_name
from tritium.graph import value_of


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a graph as strings. Inputs have the target `input`, the output has the target `return`."""

    name: str
    target: str
    type: str
    # Names of the nodes among the arguments, and the other arguments by name or position.
    inputs: tuple[str, ...]
    constants: tuple[tuple[str, str], ...] = ()
    source_line: str = ""

    @classmethod
    def of(cls, node: fx.Node) -> GraphNode:
        target = {"placeholder": "input", "output": "return"}.get(node.op) or target_name(node)
        named = [*((f"arg{index}", value) for index, value in enumerate(node.args)), *node.kwargs.items()]
        constants = tuple((name, str(value)) for name, value in named if not _has_node(value))
        inputs = tuple(source.name for source in node.all_input_nodes)
        return cls(node.name, target, type_name(node), inputs, constants, source_line(node))


def _has_node(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, (tuple, list)) and any(map(_has_node, value)))


def readable(graph: fx.Graph) -> str:
    """Return a graph as text with one line per node: name, type, operation, arguments."""
    return "\n".join(_line(node) for node in graph.nodes) + "\n"


def _line(node: fx.Node) -> str:
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    if node.op == "placeholder":
        return f"{node.name}: {type_name(node)} = input"
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    return f"{node.name}: {type_name(node)} = {target_name(node)}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return str(value)


def target_name(node: fx.Node) -> str:
    """Return the target of a node: `aten.mul.Tensor`, `torch.nn.functional.rms_norm`, `.float`."""
    if node.op == "call_method":
        return f".{node.target}"
    if operator_of(node) is not None or not callable(node.target):
        return str(node.target)
    return qualified_name(node.target).removeprefix("_")


def type_name(node: fx.Node) -> str:
    """Return a node's type: `float32[2, 7, 16]`, or the name of a Python type."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__ if value is not None else "?"


def source_line(node: fx.Node) -> str:
    """Return a node's line in the model, as `normalization.py:553 in forward`; empty if unknown."""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    if not places:
        return ""
    # Prefer the model's line to torch's wrapper around an operator.
    own = [place for place in places if "/torch/" not in place[0].replace("\\", "/")]
    file, line, function = (own or places)[-1]
    return f"{Path(file).name}:{line} in {function}"
