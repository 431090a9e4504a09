"""Observe Inductor's code generation and describe it as records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat, device
from tritium.compat.operators import OpOverload, operator_of
from tritium.report import kernel_dump
from tritium.report.flops import bytes_of, flops_of
from tritium.report.kernel_dump.dissection import Dissection
from tritium.report.neighbours import GeneratedKernel, not_fused, regions
from tritium.report.observation import Fallback, Kernel, LoweredOp, Observation, Pair, Tilings, merged


class KernelObserver:
    """Collect the records of one lowering.

    `namespace` is that of owned ops; `op_of` returns the name of the op that a Triton kernel belongs to, or None.
    """

    def __init__(self, device_type: str, namespace: str, op_of: Callable[[Any], str | None]) -> None:
        self.namespace, self.op_of = namespace, op_of
        self.kernels: list[Kernel] = []
        self.fallbacks: list[Fallback] = []
        self.lowered: list[LoweredOp] = []
        self.not_fused_pairs: list[Pair] = []
        self.dissection = Dissection()
        self.source, self.launch = self.dissection.source, self.dissection.launch
        self.saw_codegen = False
        # Cache keys of the graph's code, generated now or earlier.
        self.codes: list[str] = []
        # Decisions of the tiling policy, or None if it was off.
        self.tilings: Tilings | None = None
        self._bandwidth = device.copy_bandwidth(device.describe(device_type))
        self._defined: list[tuple[str, Sequence[Any]]] = []
        self._why: dict[frozenset[str], Any] = {}

    def kernel(self, name: str, nodes: Sequence[Any]) -> None:
        self._defined.append((name, nodes))

    def code(self, key: str) -> None:
        self.codes.append(key)

    def not_fused(self, why: Any) -> None:
        # There are many: only relevant ones are formatted, at the end.
        self._why[frozenset({why.name1, why.name2})] = why

    def observation(self) -> Observation:
        sources = kernel_dump.pack(self.dissection.kernels)
        return Observation(self.kernels, self.fallbacks, self.lowered, self.not_fused_pairs, sources)

    def graph(self, lowering: Any) -> None:
        """Describe all kernels, once the buffers that stay inside kernels and the readers of others are known."""
        self.saw_codegen = True
        kernels = [
            GeneratedKernel(name, nodes, *compat.observation.kernel_dependencies(nodes))
            for name, nodes in self._defined
        ]
        self._defined.clear()
        pairs, reasons = not_fused(kernels, self._why)
        self.not_fused_pairs += pairs
        calls = compat.observation.library_calls(lowering)
        called = {node for _, node in calls}
        # A template or an inlined small product contains the contraction itself; each is counted once.
        counted = set(called)
        places = regions(kernels, set(lowering.get_output_names()))
        for kernel, (region, ideal_bytes), why in zip(kernels, places, reasons, strict=True):
            contracted = {node: flops for node in kernel.origins if node not in counted and (flops := flops_of(node))}
            counted.update(contracted)
            self._add(
                sum(kernel.reads.values()),
                sum(kernel.writes.values()),
                sum(contracted.values()) or None,
                name=kernel.name,
                kind="generated",
                ops=kernel.operators,
                source_lines=_source_lines(kernel.origins),
                ideal_bytes=ideal_bytes,
                region=region,
                dtype=_dtype(next(iter(contracted))) if contracted else None,
                why_not_fused=why,
                tiling=self.tilings and self.tilings.of(node.get_name() for node in kernel.nodes),
            )
        for launch in compat.observation.user_kernels(lowering):
            self._launched(launch)
        for overload, node in calls:
            self._called(overload, node)
        self.fallbacks += _fallbacks(lowering)
        self.lowered += _lowered(lowering, called)
        self.dissection.graph(lowering.graph, kernels)

    def _called(self, overload: OpOverload, node: fx.Node) -> None:
        """Add an operator that generated code calls and that launches separate kernels."""
        inputs = [source.meta.get("val") for source in node.all_input_nodes]
        shapes = [_shape_text(value) for value in inputs if isinstance(value, torch.Tensor) and value.ndim > 1]
        self._add(
            bytes_of(inputs),
            bytes_of(node.meta.get("val")),
            flops_of(node),
            name=f"{overload.overloadpacket.__name__} ({', '.join(shapes)})",
            kind="owned" if overload.namespace == self.namespace else "library",
            ops=[str(overload.overloadpacket)],
            source_lines=_source_lines([node]),
            dtype=_dtype(node),
        )

    def _launched(self, launch: compat.observation.UserKernel) -> None:
        """Add a launched Triton kernel that Inductor did not write: an op's or the model's."""
        op = self.op_of(launch.function)
        self._add(
            bytes_of(launch.read),
            bytes_of(launch.written),
            name=launch.name,
            kind="library" if op is None else "owned",
            ops=[launch.function.__name__ if op is None else f"{self.namespace}.{op}"],
            source_lines=_source_lines([launch.node]),
        )

    def _add(self, read: int, written: int, flops: int | None = None, **fields: Any) -> None:
        """Add a kernel. Contractions have no estimated time: arithmetic dominates it."""
        us = None
        if self._bandwidth is not None and flops is None:
            us = round((read + written) / self._bandwidth * 1e6, 2)
        moved = {"bytes_read": read, "bytes_written": written, "ideal_bytes": read + written}
        self.kernels.append(Kernel(**{**moved, "flops": flops, "estimated_us": us, **fields}))


def _fallbacks(lowering: Any) -> list[Fallback]:
    """Return operators that Inductor calls, with counts by argument shapes."""
    single = []
    for overload, inputs in compat.observation.fallback_nodes(lowering):
        op, reason = _fallback_reason(overload, [dtype for dtype, _ in inputs])
        arguments = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(sizes)}" for dtype, sizes in inputs)
        has_lowering = compat.observation.has_lowering(overload)
        has_decomposition = compat.observation.has_decomposition(overload)
        single.append(Fallback(op, 1, reason, {arguments: 1}, has_lowering, has_decomposition))
    return merged(single)


def _fallback_reason(overload: OpOverload, dtypes: Sequence[torch.dtype]) -> tuple[str, str]:
    """Return the name of an operator in the report, and why Inductor calls it."""
    op = str(overload)
    complex_dtypes = [dtype for dtype in dtypes if dtype.is_complex]
    if complex_dtypes:
        name = f"{op}({str(complex_dtypes[0]).removeprefix('torch.')})"
        return name, "Inductor generates no code for complex numbers"
    if not op.startswith("aten."):
        return op, "an operator of its own: Inductor calls it as it is"
    if "attention" in op:
        return op, "attention has its own kernels, Inductor calls them"
    if compat.observation.has_lowering(overload):
        return op, "Inductor has a lowering for it that does not take these arguments on this device"
    return op, "Inductor has no lowering for it"


def _lowered(lowering: Any, called: Collection[fx.Node]) -> list[LoweredOp]:
    """Return the operators of Inductor's graph that became generated code, with counts."""
    overloads = (operator_of(node) for node in lowering.graph.nodes if node not in called)
    counts = Counter(
        str(overload)
        for overload in overloads
        if overload is not None
        and compat.observation.has_lowering(overload)
        and not compat.observation.is_view(overload)
    )
    return [LoweredOp(op, count) for op, count in counts.most_common()]


def _shape_text(value: torch.Tensor) -> str:
    sizes = [str(size) for size in value.shape]
    return "×".join(f"({size})" if " " in size else size for size in sizes)


def _dtype(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(first.dtype).removeprefix("torch.") if isinstance(first, torch.Tensor) else None


def _source_lines(origins: Sequence[fx.Node]) -> list[str]:
    lines: dict[str, None] = {}
    for node in origins:
        places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        if places:
            lines[f"{Path(places[-1][0]).name}:{places[-1][1]}"] = None
    return list(lines)
