"""The source of one generated kernel and everything that is needed to run it alone, as data that can be stored."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.compat.observation import KernelArgument
from tritium.report.graph_text import GraphNode
from tritium.report.record import Record


@dataclass(kw_only=True)
class KernelSource(Record):
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
