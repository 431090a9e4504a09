"""Write graphs as text and as ONNX files for Netron.

The ONNX file is a diagram and cannot be run: its operators are those of the graph. It is written field by field,
because this package does not depend on a protobuf library; the field numbers are those of onnx.proto3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from tritium.graph import value_of
from tritium.report import kernel_dump

_ONNX_DTYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.complex64: 14,
    torch.complex128: 15,
    torch.bfloat16: 16,
}


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


def target_name(node: fx.Node) -> str:
    """Return the target of a node: `aten.mul.Tensor`, `torch.nn.functional.rms_norm`, `.float`."""
    target = node.target
    if node.op == "call_method":
        return f".{target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if not callable(target):
        return str(target)
    return _get_qualified_name(target).removeprefix("_")


def _argument(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_argument, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return str(value)


def type_name(node: fx.Node) -> str:
    """Return a node's type: `float32[2, 7, 16]`, or the name of a Python type."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__ if value is not None else "?"


def write(graph: fx.Graph, folder: Path, name: str) -> None:
    """Write `<name>.txt` and `<name>.onnx` into a folder; create it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(readable(graph), encoding="utf-8")
    (folder / f"{name}.onnx").write_bytes(onnx_bytes(graph, name))


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_") or "graph"


# --- protobuf wire format: field number and type, then the value ------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _blob(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def onnx_bytes(graph: fx.Graph, name: str) -> bytes:
    """Return a ModelProto with one node per operation of the graph."""
    nodes = b"".join(_blob(1, _onnx_node(node)) for node in graph.nodes if node.op not in ("placeholder", "output"))
    inputs = b"".join(_blob(11, _onnx_value(node)) for node in graph.find_nodes(op="placeholder"))
    results = [node for out in graph.find_nodes(op="output") for node in out.all_input_nodes]
    outputs = b"".join(_blob(12, _onnx_value(node)) for node in results)
    inner = b"".join(
        _blob(13, _onnx_value(node))
        for node in graph.nodes
        if node.op not in ("placeholder", "output") and _typed(node)
    )
    drawing = nodes + _blob(2, name) + inputs + outputs + inner
    opsets = _blob(8, _blob(1, "") + _number(2, 17)) + _blob(8, _blob(1, "torch") + _number(2, 1))
    return _number(1, 8) + _blob(2, "tritium") + _blob(7, drawing) + opsets


def _onnx_node(node: fx.Node) -> bytes:
    inputs = b"".join(_blob(1, arg.name) for arg in node.all_input_nodes)
    literals = [(f"arg{index}", arg) for index, arg in enumerate(node.args) if not _has_node(arg)]
    literals += [(key, value) for key, value in node.kwargs.items() if not _has_node(value)]
    attributes = b"".join(_blob(5, _onnx_attribute(key, str(value))) for key, value in literals)
    return (
        inputs
        + _blob(2, node.name)
        + _blob(3, node.name)
        + _blob(4, target_name(node))
        + attributes
        + _blob(7, "torch")
    )


def _onnx_attribute(name: str, value: str) -> bytes:
    # Type 3 is STRING, stored in field 4.
    return _blob(1, name) + _number(20, 3) + _blob(4, value)


def _has_node(value: Any) -> bool:
    return any(True for _ in _nodes_in(value))


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _nodes_in(part)


def _typed(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _onnx_value(node: fx.Node) -> bytes:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return _blob(1, node.name)
    shape = b"".join(_blob(1, _onnx_dim(size)) for size in value.shape)
    tensor = _number(1, _ONNX_DTYPES.get(value.dtype, 0)) + _blob(2, shape)
    return _blob(1, node.name) + _blob(2, _blob(1, tensor))


def _onnx_dim(size: Any) -> bytes:
    return _number(1, size) if isinstance(size, int) else _blob(2, str(size))


class GraphLog:
    """Log the graph before and after every pass of one compilation, and the graphs of failures."""

    def __init__(self, folder: Path | None, graph_name: str) -> None:
        self.folder = folder / file_name(graph_name) if folder is not None else None
        self._count = 0

    def note(self, graph: fx.Graph, stage: str, when: str) -> None:
        if self.folder is not None:
            if when == "before":
                self._count += 1
            write(graph, self.folder, f"{self._count:02d}-{file_name(stage)}-{when}")

    def failed(
        self,
        graphs: Iterable[tuple[str, fx.Graph]],
        stage: str,
        otherwise: Path,
        kernels: Sequence[Mapping[str, Any]] = (),
    ) -> str | None:
        """Write the graphs and kernels of a failed stage, to `otherwise` if logging is off.

        Returns the folder, or None if it cannot be written.
        """
        folder = self.folder or otherwise
        try:
            for name, graph in graphs:
                write(graph, folder, f"failed-{file_name(stage)}-{name}")
            kernel_dump.write(folder / f"failed-{file_name(stage)}-kernels", kernels, ())
        except OSError:
            return None
        return str(folder)
