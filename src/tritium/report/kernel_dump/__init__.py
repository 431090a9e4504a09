"""Write a folder per generated kernel, in which it can be read, run, edited and measured alone.

fused_<operators>_<hash>/
    fragment.py           the operators it replaces, as a script that creates inputs and runs them one by one
    fragment.onnx         the same operators as a graph for Netron
    loops.txt             Inductor's loop IR
    kernel.py, .cpp       the generated source
    benchmark.py          runs and times that source; needs only torch
    meta.json             arguments, tiling, bytes, ideal bytes, reasons; and missing files with the reason
"""

from __future__ import annotations

import base64
import inspect
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritium import disk
from tritium.compat import kernel_benchmark
from tritium.compat.observation import KernelArgument
from tritium.report.graph_text import GraphNode
from tritium.report.observation import Kernel, Record
from tritium.report.onnx_file import write_onnx

# Maximum number of operators in a folder's name.
_NAMED = 6

_SOURCE = {"triton": "kernel.py", "cpp": "kernel.cpp"}


@dataclass(kw_only=True)
class KernelSource(Record):
    """The source of one generated kernel and everything that is needed to run it alone, as data that can be stored."""

    name: str
    # "triton" or "cpp".
    language: str
    source: str
    operators: list[str] = field(default_factory=list)
    device: str = ""
    # Inductor's loop IR.
    loops: str | None = None
    # The operators as a script and as a graph.
    fragment: str | None = None
    graph: list[GraphNode] = field(default_factory=list)
    arguments: list[KernelArgument] = field(default_factory=list)
    # Parts that could not be described, with the reason; and the reason why the kernel cannot run alone.
    missing: dict[str, str] = field(default_factory=dict)
    not_runnable: str | None = None

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> KernelSource:
        graph = [GraphNode(**node) for node in stored["graph"]]
        return cls(
            **{**stored, "graph": graph, "arguments": [KernelArgument(**entry) for entry in stored["arguments"]]}
        )


def pack(kernels: Sequence[KernelSource]) -> str:
    """Compress kernels, so that they can be kept with every compiled graph."""
    return base64.b64encode(zlib.compress(json.dumps([kernel.to_dict() for kernel in kernels]).encode())).decode()


def unpack(packed: str) -> list[KernelSource]:
    return [KernelSource.from_dict(entry) for entry in json.loads(zlib.decompress(base64.b64decode(packed)))]


def write(folder: Path, kernels: Sequence[KernelSource], records: Sequence[Kernel]) -> list[Path]:
    """Write a folder per kernel; `records` are the report's kernels of this graph, matched by name."""
    by_name = {record.name: record for record in reversed(records)}
    return [_write_one(folder / folder_name(kernel), kernel, by_name.get(kernel.name)) for kernel in kernels]


def folder_name(kernel: KernelSource) -> str:
    """Return a folder name, equal for equal kernels in any process: the hash excludes the kernel's name.

    >>> operators = ["aten.add", "aten.mul"]
    >>> folder_name(KernelSource(name="cpp_fused_add_0", language="cpp", source="int x;", operators=operators))
    'fused_add_mul_93997fec'
    """
    operators = [re.sub(r"\W", "_", name.partition(".")[2] or name) for name in kernel.operators]
    words = "_".join(operators[:_NAMED]) or "nothing"
    return f"fused_{words}_{disk.digest(kernel.source.replace(kernel.name, ''))[:8]}"


def _write_one(folder: Path, kernel: KernelSource, record: Kernel | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    meta = {**kernel.to_dict(), **(record.to_dict() if record is not None else {})}
    for name in ("source", "loops", "fragment", "graph", "ops", "kind"):
        meta.pop(name, None)
    texts = {
        _SOURCE[kernel.language]: kernel.source,
        "loops.txt": kernel.loops,
        "fragment.py": kernel.fragment,
        "benchmark.py": inspect.getsource(kernel_benchmark),
        "meta.json": json.dumps(meta, indent=2) + "\n",
    }
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    if kernel.graph:
        write_onnx(kernel.graph, folder / "fragment.onnx")
    return folder
