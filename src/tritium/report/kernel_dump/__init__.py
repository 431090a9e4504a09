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

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritium import disk
from tritium.compat import kernel_benchmark
from tritium.report.kernel_dump.source import KernelSource, pack, unpack
from tritium.report.observation import Kernel
from tritium.report.onnx_file import write_onnx

__all__ = ["KernelSource", "folder_name", "pack", "unpack", "write"]

# Maximum number of operators in a folder's name.
_NAMED = 6

_SOURCE = {"triton": "kernel.py", "cpp": "kernel.cpp"}


def write(folder: Path, kernels: Sequence[KernelSource], records: Sequence[Kernel]) -> list[Path]:
    """Write a folder per kernel; `records` are the report's kernels of this graph, matched by name."""
    by_name = {record.name: record for record in reversed(records)}
    return [_write_one(folder / folder_name(kernel), kernel, by_name.get(kernel.name)) for kernel in kernels]


def folder_name(kernel: KernelSource) -> str:
    """Return a folder name, equal for equal kernels in any process: the hash excludes the kernel's name.

    >>> operators = ["aten.add", "aten.mul"]
    >>> folder_name(KernelSource(name="cpp_fused_add_0", language="cpp", source="int x;", operators=operators))
    'fused_add_mul_dca32da2'
    """
    operators = [re.sub(r"\W", "_", name.partition(".")[2] or name) for name in kernel.operators]
    words = "_".join(operators[:_NAMED]) or "nothing"
    return f"fused_{words}_{disk.digest(kernel.source.replace(kernel.name, ''))[:8]}"


def _write_one(folder: Path, kernel: KernelSource, record: Kernel | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        _SOURCE[kernel.language]: kernel.source,
        "loops.txt": kernel.loops,
        "fragment.py": kernel.fragment,
        "benchmark.py": inspect.getsource(kernel_benchmark),
        "meta.json": json.dumps(_meta(kernel, record), indent=2) + "\n",
    }
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    if kernel.graph:
        write_onnx(kernel.graph, folder / "fragment.onnx")
    return folder


def _meta(kernel: KernelSource, record: Kernel | None) -> dict[str, Any]:
    """Return the report's record, and the data needed to run the kernel alone."""
    about = record.to_dict() if record is not None else {}
    known = {**kernel.to_dict(), **about}
    left_out = ("source", "loops", "fragment", "graph", "ops", "kind")
    return {name: value for name, value in known.items() if name not in left_out}
