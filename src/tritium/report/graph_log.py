"""Write the graph before and after every pass, and the graphs and kernels of failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import fx

from tritium.report import kernel_dump
from tritium.report.graph_text import GraphNode, readable
from tritium.report.kernel_dump import KernelSource
from tritium.report.onnx_file import write_onnx


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
        self, graphs: Iterable[tuple[str, fx.Graph]], stage: str, otherwise: Path, kernels: Sequence[KernelSource] = ()
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


def write(graph: fx.Graph, folder: Path, name: str) -> None:
    """Write `<name>.txt` and `<name>.onnx` into a folder; create it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(readable(graph), encoding="utf-8")
    write_onnx([GraphNode.of(node) for node in graph.nodes], folder / f"{name}.onnx")


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_") or "graph"
