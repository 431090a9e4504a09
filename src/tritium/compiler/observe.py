"""Observe code generation (kernels, fallbacks), and store observations for warm starts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat, device
from tritium.compiler.count_flops import bytes_of, flops_of
from tritium.compiler.dissect import Dissection, Kernel
from tritium.compiler.dump import readable
from tritium.ops import triton_launch
from tritium.ops.op import NAMESPACE
from tritium.report import kernel_dump
from tritium.tiling.policy import Decisions

# Maximum number of reasons per kernel; further ones are repetitive.
MOST_REASONS = 3

# The reason for a pair that Inductor's scheduler did not consider.
UNSAID = "Inductor did not consider it"

# For each kernel, the buffers it reads and those it writes, with their bytes.
Moved = Sequence[tuple[dict[str, int], dict[str, int]]]

# Format version of stored observations; older ones are not found.
_FORMAT = b"3"


class KernelObserver:
    """Collect the kernels and fallbacks of one lowering."""

    def __init__(self, device_type: str) -> None:
        self.kernels: list[dict[str, Any]] = []
        self.fallbacks: list[dict[str, Any]] = []
        self.lowered: list[dict[str, Any]] = []
        self.not_fused_pairs: list[dict[str, Any]] = []
        self.dissection = Dissection()
        self.saw_codegen = False
        # Cache keys of the graph's code, generated now or earlier.
        self.codes: list[str] = []
        # Decisions of the tiling policy, or None if it was off.
        self.tilings: Decisions | None = None
        self._bandwidth = device.copy_bandwidth(device.describe(device_type))
        self._defined: list[tuple[str, Sequence[Any]]] = []
        self._why: dict[frozenset[str], Any] = {}

    def kernel(self, name: str, nodes: Sequence[Any]) -> None:
        self._defined.append((name, nodes))

    def code(self, key: str) -> None:
        self.codes.append(key)

    def source(self, name: str, language: str, text: str) -> None:
        self.dissection.source(name, language, text)

    def launch(self, name: str, arguments: Callable[[], list[compat.kernels.KernelArgument]]) -> None:
        self.dissection.launch(name, arguments)

    def observation(self) -> dict[str, Any]:
        """Return the data for a report, as JSON data."""
        return {
            "kernels": self.kernels,
            "fallbacks": self.fallbacks,
            "lowered": self.lowered,
            "not_fused": self.not_fused_pairs,
            "sources": kernel_dump.pack(self.dissection.found),
        }

    def not_fused(self, why: Any) -> None:
        # There are many: only relevant ones are formatted, at the end.
        self._why[frozenset({why.name1, why.name2})] = why

    def graph(self, lowering: Any) -> None:
        """Describe all kernels, once the buffers that stay inside kernels and the readers of others are known."""
        self.saw_codegen = True
        moved = [compat.observation.kernel_dependencies(nodes) for _, nodes in self._defined]
        ideal, region = _regions(moved, set(lowering.get_output_names()))
        calls = compat.observation.library_calls(lowering)
        called = {node for _, node in calls}
        for index, (name, nodes) in enumerate(self._defined):
            reads, writes = moved[index]
            total = sum(reads.values()) + sum(writes.values())
            origins = _origins(nodes)
            # A template or an inlined small product contains the contraction itself; count each only once.
            contracted = {node: flops for node in origins if node not in called and (flops := flops_of(node))}
            called.update(contracted)
            flops = sum(contracted.values()) or None
            self.kernels.append(
                {
                    "name": name,
                    "kind": "generated",
                    "ops": _operators(origins),
                    "source_lines": _source_lines(origins),
                    "bytes_read": sum(reads.values()),
                    "bytes_written": sum(writes.values()),
                    "ideal_bytes": ideal[index],
                    "region": region[index],
                    "flops": flops,
                    "dtype": _dtype(next(iter(contracted))) if contracted else None,
                    "estimated_us": self._estimate(total, flops),
                    "measured_us": None,
                    "why_not_fused": self._reasons(index, moved),
                    "tiling": self._tiling(nodes),
                }
            )
        self.kernels += [self._launch(found) for found in compat.observation.user_kernels(lowering)]
        self.kernels += [self._call(overload, node) for overload, node in calls]
        self.fallbacks += _fallbacks(lowering)
        self.lowered += _lowered(lowering, [node for _, node in calls])
        self.not_fused_pairs += self._pairs(moved)
        self.dissection.graph(
            lowering.graph,
            [
                Kernel(name, nodes, _origins(nodes), set(moved[index][0]))
                for index, (name, nodes) in enumerate(self._defined)
            ],
        )
        self._defined.clear()

    def _call(self, overload: torch._ops.OpOverload, node: fx.Node) -> dict[str, Any]:
        """Describe an operator that generated code calls and that launches separate kernels."""
        inputs = [source.meta.get("val") for source in node.all_input_nodes]
        read, written, flops = bytes_of(inputs), bytes_of(node.meta.get("val")), flops_of(node)
        shapes = [_shape_text(value) for value in inputs if isinstance(value, torch.Tensor) and value.ndim > 1]
        return {
            "name": f"{overload._opname} ({', '.join(shapes)})",
            "kind": "owned" if overload.namespace == NAMESPACE else "library",
            "ops": [str(overload.overloadpacket)],
            "source_lines": _source_lines([node]),
            "bytes_read": read,
            "bytes_written": written,
            "ideal_bytes": read + written,
            "region": None,
            "flops": flops,
            "dtype": _dtype(node),
            "estimated_us": self._estimate(read + written, flops),
            "measured_us": None,
            "why_not_fused": [],
            "tiling": None,
        }

    def _launch(self, found: compat.observation.UserKernel) -> dict[str, Any]:
        """Describe a launched Triton kernel that Inductor did not write: an op's or the model's."""
        op = triton_launch.op_of(found.function)
        read, written = bytes_of(found.read), bytes_of(found.written)
        return {
            "name": found.name,
            "kind": "library" if op is None else "owned",
            "ops": [found.function.__name__ if op is None else f"{NAMESPACE}.{op}"],
            "source_lines": _source_lines([found.node]),
            "bytes_read": read,
            "bytes_written": written,
            "ideal_bytes": read + written,
            "region": None,
            "flops": None,
            "dtype": None,
            "estimated_us": self._estimate(read + written, None),
            "measured_us": None,
            "why_not_fused": [],
            "tiling": None,
        }

    def _tiling(self, nodes: Sequence[Any]) -> dict[str, Any] | None:
        if self.tilings is None:
            return None
        decided = self.tilings.of(node.get_name() for node in nodes)
        return decided.to_dict() if decided is not None else None

    def _estimate(self, moved: int, flops: int | None) -> float | None:
        """Estimate the microseconds for moving the bytes; None for a contraction, where arithmetic dominates."""
        if self._bandwidth is None or flops is not None:
            return None
        return round(moved / self._bandwidth * 1e6, 2)

    def _reasons(self, index: int, moved: Moved) -> list[str]:
        """Return the reasons why a kernel is not fused with kernels that it exchanges data with."""
        reads, writes = moved[index]
        reasons: dict[str, None] = {}
        for other, (their_reads, their_writes) in enumerate(moved):
            if other != index and (reads.keys() & their_writes.keys() or writes.keys() & their_reads.keys()):
                for words in self._between(index, other):
                    reasons[f"{self._defined[other][0]}: {words}"] = None
        return list(reasons)[:MOST_REASONS]

    def _pairs(self, moved: Moved) -> list[dict[str, Any]]:
        """Return pairs of kernels that pass or share data, with Inductor's reasons for not fusing them."""
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        touching: dict[str, list[int]] = {}
        for second, (reads, writes) in enumerate(moved):
            earlier = sorted({first for name in reads for first in touching.get(name, ())})
            for name in [*reads, *writes]:
                touching.setdefault(name, []).append(second)
            for first in earlier:
                their_reads, their_writes = moved[first]
                passed = sum(size for name, size in their_writes.items() if name in reads)
                shared = sum(size for name, size in their_reads.items() if name in reads)
                if not passed and not shared:
                    continue
                reasons = self._between(first, second)
                # Pairs that only share inputs are listed only if Inductor considered fusing them.
                if not reasons and not passed:
                    continue
                names = self._defined[first][0], self._defined[second][0]
                reason = "; ".join(reasons[:MOST_REASONS]) or UNSAID
                entry = found.setdefault(
                    (*names, reason),
                    {
                        "first": names[0],
                        "second": names[1],
                        "count": 0,
                        "bytes_passed": passed,
                        "bytes_shared": shared,
                        "reason": reason,
                    },
                )
                entry["count"] += 1
        return list(found.values())

    def _between(self, one: int, other: int) -> list[str]:
        """Return Inductor's reasons for not fusing two kernels; empty if it never considered it."""
        words: dict[str, None] = {}
        for mine in _names(self._defined[one][1]):
            for theirs in _names(self._defined[other][1]):
                if (why := self._why.get(frozenset({mine, theirs}))) is not None:
                    words[_worded(why)] = None
        return list(words)


def _fallbacks(lowering: Any) -> list[dict[str, Any]]:
    """Return operators that Inductor calls, with counts by argument shapes."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for overload, inputs in compat.observation.fallback_nodes(lowering):
        op, reason = _fallback(overload, [dtype for dtype, _ in inputs])
        arguments = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(sizes)}" for dtype, sizes in inputs)
        entry = found.setdefault(
            (op, reason),
            {
                "op": op,
                "count": 0,
                "reason": reason,
                "arguments": {},
                "has_lowering": compat.observation.has_lowering(overload),
                "has_decomposition": compat.observation.has_decomposition(overload),
            },
        )
        entry["count"] += 1
        entry["arguments"][arguments] = entry["arguments"].get(arguments, 0) + 1
    return list(found.values())


def _lowered(lowering: Any, called: Sequence[fx.Node]) -> list[dict[str, Any]]:
    """Return the operators of Inductor's graph that became generated code, with counts."""
    elsewhere = set(called)
    counted = Counter(
        str(node.target)
        for node in lowering.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node not in elsewhere
        and compat.observation.has_lowering(node.target)
        and not compat.observation.is_view(node.target)
    )
    return [{"op": op, "count": count} for op, count in counted.most_common()]


def _worded(why: Any) -> str:
    try:
        words = str(why.reason % why.args)
    except TypeError:
        words = str(why.reason)
    # Only called for kernels that do exchange data.
    return f"{words} that both index alike" if words == "no shared data" else words


def _names(nodes: Sequence[Any]) -> list[str]:
    return [inner.get_name() for node in nodes for inner in [node, *node.get_nodes()]]


def _regions(moved: Moved, outputs: set[str]) -> tuple[list[int], list[int]]:
    """Return for each kernel the bytes and the number of its connected region of generated kernels.

    The bytes are those of the region's distinct inputs and outputs.
    """
    region = list(range(len(moved)))

    def find(index: int) -> int:
        while region[index] != index:
            index = region[index]
        return index

    writer = {name: index for index, (_, writes) in enumerate(moved) for name in writes}
    for index, (reads, _) in enumerate(moved):
        for name in reads:
            if name in writer:
                region[find(index)] = find(writer[name])
    totals: dict[int, int] = {}
    for root in {find(index) for index in range(len(moved))}:
        members = [index for index in range(len(moved)) if find(index) == root]
        written = {name: size for index in members for name, size in moved[index][1].items()}
        read = {name: size for index in members for name, size in moved[index][0].items()}
        # A buffer that only this region reads would not exist if the region were a single kernel.
        kept = {name for name in written if name in outputs or name not in read}
        inputs = sum(size for name, size in read.items() if name not in written)
        totals[root] = inputs + sum(written[name] for name in kept)
    roots = [find(index) for index in range(len(moved))]
    return [totals[root] for root in roots], roots


def _origins(nodes: Sequence[Any]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for inner in node.get_nodes():
            for origin in getattr(inner.node, "origins", ()):
                found[origin] = None
    return sorted(found)


def _operators(origins: Sequence[fx.Node]) -> list[str]:
    """Return operator names such as `aten.mul`, each once, in graph order."""
    targets = (node.target for node in origins if isinstance(node.target, torch._ops.OpOverload))
    return list(dict.fromkeys(str(target.overloadpacket) for target in targets))


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


def _fallback(overload: torch._ops.OpOverload, dtypes: Sequence[torch.dtype]) -> tuple[str, str]:
    op = str(overload)
    of = [dtype for dtype in dtypes if dtype.is_complex]
    if of:
        name = f"{op}({str(of[0]).removeprefix('torch.')})"
        return name, "Inductor generates no code for complex numbers"
    if not op.startswith("aten."):
        return op, "an operator of its own: Inductor calls it as it is"
    if "attention" in op:
        return op, "attention has its own kernels, Inductor calls them"
    if compat.observation.has_lowering(overload):
        return op, "Inductor has a lowering for it that does not take these arguments on this device"
    return op, "Inductor has no lowering for it"


# The keys of every stored observation.
PARTS = {"kernels", "fallbacks", "lowered", "not_fused", "sources"}

# The only key in a file that refers to another observation.
_LINK = "of"

# Keys that this process wrote or found; they are saved with its artifacts.
_used: dict[str, None] = {}


class Store:
    """Observations by key, as JSON files in Inductor's cache folder: they are moved and deleted with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def load(self, key: str) -> dict[str, Any] | None:
        found = self._read(key)
        if found is None or not found.keys() >= PARTS:
            return None
        _used[key] = None
        return found

    def save(self, key: str, observation: dict[str, Any]) -> None:
        _used[key] = None
        self._write(key, observation)

    def link(self, key: str, target: str) -> None:
        """Make a second key refer to an observation."""
        self._write(key, {_LINK: target})

    def linked(self, key: str) -> dict[str, Any] | None:
        """Return the observation that a second key refers to, or None."""
        target = (self._read(key) or {}).get(_LINK)
        found = self._read(target) if isinstance(target, str) else None
        return found if found is not None and found.keys() >= PARTS else None

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self, key: str, content: dict[str, Any]) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same key: replacing the file is atomic.
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(content, out)
        Path(temporary).replace(path)


def store() -> Store:
    return Store(compat.inductor.cache_dir() / "tritium")


def used() -> list[str]:
    """Return the keys of all observations that this process wrote or found."""
    return list(_used)


def store_key(graph: fx.Graph, identity: bytes) -> str:
    """Return a digest of all inputs of code generation: rewritten graph, shapes, identity, Inductor's settings."""
    digest = hashlib.sha256(_FORMAT + identity)
    digest.update(torch.__version__.encode())
    digest.update(readable(graph).encode())
    digest.update("".join(f"{node.name}{_strides(node)}" for node in graph.find_nodes(op="placeholder")).encode())
    digest.update(settings_digest())
    return digest.hexdigest()


def settings_digest() -> bytes:
    """Return a digest of Inductor's current settings in this thread."""
    # Exclude objects: their repr contains an address, and the content of relevant ones is in `identity`.
    plain = (str, int, float, bool, type(None))
    settings = {name: value for name, value in compat.inductor.inductor_settings().items() if isinstance(value, plain)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()


def code_key(codes: Sequence[str]) -> str:
    """Return a second key, of the code that runs a graph.

    Inductor compiles graphs that differ only in names once. This key finds the observation of the first one.
    """
    return hashlib.sha256(_FORMAT + b"code" + "\0".join(codes).encode()).hexdigest()


def _strides(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    return f"{value.stride()}{value.device}" if isinstance(value, torch.Tensor) else str(value)
