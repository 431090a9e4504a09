"""Graphs as ONNX files, which Netron shows. They cannot run: their operators are those of the graph."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritium.report.graph_text import GraphNode

# ONNX's names for dtypes that are not torch's name in capitals.
_DTYPES = {"float32": "FLOAT", "float64": "DOUBLE"}


def write_onnx(nodes: Sequence[GraphNode], path: Path) -> None:
    """Write a graph as an ONNX file named after the graph; without the package `onnx` write nothing and warn once."""
    onnx = _package()
    if onnx is None:
        return
    values = {node.name: _value(onnx, node) for node in nodes}
    calls = [node for node in nodes if node.target not in ("input", "return")]
    graph = onnx.helper.make_graph(
        [_call(onnx, node) for node in calls],
        path.stem,
        [values[node.name] for node in nodes if node.target == "input"],
        [values[name] for node in nodes if node.target == "return" for name in node.inputs],
        value_info=[values[node.name] for node in calls],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("torch", 1)]
    onnx.save(onnx.helper.make_model(graph, producer_name="tritium", ir_version=8, opset_imports=opsets), path)


@functools.cache
def _package() -> Any:
    try:
        importlib.import_module("onnx.helper")
        return importlib.import_module("onnx")
    except ImportError:
        warnings.warn(
            "tritium: graphs are written as text only; for .onnx files: pip install 'tritium[report]'",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _call(onnx: Any, node: GraphNode) -> Any:
    call = onnx.helper.make_node(node.target, node.inputs, [node.name], name=node.name, domain="torch")
    call.attribute.extend(onnx.helper.make_attribute(name, text) for name, text in node.constants)
    return call


def _value(onnx: Any, node: GraphNode) -> Any:
    """Return name, dtype and shape of a node; the name alone if it is not a tensor."""
    parts = re.fullmatch(r"(\w+)\[(.*)\]", node.type)
    if parts is None:
        return onnx.ValueInfoProto(name=node.name)
    dtype = _DTYPES.get(parts[1]) or parts[1].replace("_", "").upper()
    sizes = [int(size) if size.isdecimal() else size for size in parts[2].split(", ") if size]
    return onnx.helper.make_tensor_value_info(node.name, getattr(onnx.TensorProto, dtype, 0), sizes)
