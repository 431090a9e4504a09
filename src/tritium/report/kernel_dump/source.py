"""The source of one generated kernel and everything that is needed to run it alone, as data that can be stored."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.report.graph_text import GraphNode


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a kernel launch, as `benchmark.py` creates it."""

    parameter: str
    # "tensor", "number", or "workspace": memory that must be zero before the first launch.
    kind: str
    value: int | float
    buffer: str
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    # For tensors: whether the kernel reads and writes it, and the nodes of Inductor's graph whose values it holds.
    input: bool = False
    output: bool = False
    reads: str | None = None
    writes: str | None = None


@dataclass(kw_only=True)
class KernelSource:
    """One generated kernel."""

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
    arguments: list[Argument] = field(default_factory=list)
    # Parts that could not be described, with the reason; and the reason why the kernel cannot run alone.
    missing: dict[str, str] = field(default_factory=dict)
    not_runnable: str | None = None

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> KernelSource:
        graph = [GraphNode(**node) for node in stored["graph"]]
        return cls(**{**stored, "graph": graph, "arguments": [Argument(**entry) for entry in stored["arguments"]]})


def pack(kernels: Sequence[KernelSource]) -> str:
    """Compress kernels, so that they can be kept with every compiled graph."""
    return base64.b64encode(zlib.compress(json.dumps(list(map(dataclasses.asdict, kernels))).encode())).decode()


def unpack(packed: str) -> list[KernelSource]:
    return [KernelSource.from_dict(entry) for entry in json.loads(zlib.decompress(base64.b64decode(packed)))]
