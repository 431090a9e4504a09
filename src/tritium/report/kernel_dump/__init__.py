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
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Maximum number of operators in a folder's name.
_NAMED = 6

_SOURCE = {"triton": "kernel.py", "cpp": "kernel.cpp"}


def pack(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Compress the result of `compiler/dissect.py`, so that it can be kept with every compiled graph."""
    return base64.b64encode(zlib.compress(json.dumps(list(kernels)).encode())).decode()


def unpack(packed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def write(folder: Path, kernels: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write a folder per kernel; `measured` are the report's entries for this graph, matched by name."""
    about: dict[str, Mapping[str, Any]] = {}
    for entry in measured:
        about.setdefault(str(entry["name"]), entry)
    return [_write_one(folder, kernel, about.get(str(kernel["name"]), {})) for kernel in kernels]


def folder_name(kernel: Mapping[str, Any]) -> str:
    """Return a folder name, equal for equal kernels in any process: the hash excludes the kernel's name.

    >>> folder_name({"name": "cpp_fused_add_0", "operators": ["aten.add", "aten.mul"], "source": "int x;"})
    'fused_add_mul_e13e332b'
    """
    operators = [re.sub(r"\W", "_", name.partition(".")[2] or name) for name in kernel["operators"]]
    words = "_".join(operators[:_NAMED]) or "nothing"
    source = kernel["source"].replace(kernel["name"], "")
    return f"fused_{words}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def _write_one(parent: Path, kernel: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    folder = parent / folder_name(kernel)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        _SOURCE[kernel["language"]]: kernel["source"],
        "loops.txt": kernel.get("loops"),
        "fragment.py": kernel.get("fragment"),
        "benchmark.py": Path(__file__).with_name("benchmark.py").read_text(encoding="utf-8"),
        "meta.json": json.dumps(describe(kernel, about), indent=2) + "\n",
    }
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    if kernel.get("drawing") is not None:
        (folder / "fragment.onnx").write_bytes(base64.b64decode(kernel["drawing"]))
    return folder


def describe(kernel: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of meta.json: the report's entry, and the data needed to run the kernel alone."""
    texts = ("source", "loops", "fragment", "drawing")
    return {
        **{name: value for name, value in kernel.items() if name not in texts},
        **{name: value for name, value in about.items() if name not in ("name", "ops", "kind")},
        # The tiling in the source, and the tiling policy's decision with its reason.
        "tiling": {**tiling(kernel["source"], kernel["language"]), "decision": about.get("tiling")},
    }


def tiling(source: str, language: str) -> dict[str, Any]:
    """Parse a kernel's tiling from its source."""
    if language == "cpp":
        steps = re.findall(r"(\w+)\s*\+=\s*static_cast<int64_t>\((\d+)L?\)\)", source)
        threads = re.findall(r"num_threads\((\d+)\)", source)
        return {
            "steps": [{"loop": loop, "step": int(step)} for loop, step in steps],
            "vectorised": "at::vec::" in source,
            "threads": int(threads[0]) if threads else 1,
        }
    kind = re.search(r"@triton_heuristics\.(\w+)\(", source)
    hints = re.search(r"size_hints=(\{[^}]*\})", source)
    hint = re.search(r"reduction_hint=ReductionHint\.(\w+)", source)
    return {
        "kind": kind[1] if kind else None,
        "size_hints": dict(_pairs(hints[1])) if hints else {},
        "reduction_hint": hint[1] if hint else None,
    }


def _pairs(text: str) -> list[tuple[str, int]]:
    return [(name, int(size)) for name, size in re.findall(r"'(\w+)':\s*(\d+)", text)]
