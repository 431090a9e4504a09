"""Generated kernels that exchange data: their regions, and Inductor's reasons for not fusing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from tritium import compat
from tritium.compat.operators import operator_of
from tritium.report.observation import Pair

# Maximum number of reasons per kernel; further ones are repetitive.
MOST_REASONS = 3

# The reason for a pair that Inductor's scheduler did not consider.
UNSAID = "Inductor did not consider it"


@dataclass(frozen=True)
class GeneratedKernel:
    """A generated kernel: its scheduler nodes, and the buffers that it reads and writes, with their bytes."""

    name: str
    nodes: Sequence[Any]
    reads: dict[str, int]
    writes: dict[str, int]

    @classmethod
    def of(cls, name: str, nodes: Sequence[Any]) -> GeneratedKernel:
        return cls(name, nodes, *compat.observation.kernel_dependencies(nodes))

    @cached_property
    def origins(self) -> list[fx.Node]:
        """The nodes of Inductor's graph that it computes, in graph order."""
        inner = (part.node for node in self.nodes for part in node.get_nodes())
        return sorted(dict.fromkeys(origin for part in inner for origin in getattr(part, "origins", ())))

    @property
    def operators(self) -> list[str]:
        """The names of its operators such as `aten.mul`, each once, in graph order."""
        overloads = (overload for node in self.origins if (overload := operator_of(node)) is not None)
        return list(dict.fromkeys(str(overload.overloadpacket) for overload in overloads))

    @cached_property
    def node_names(self) -> list[str]:
        return [part.get_name() for node in self.nodes for part in [node, *node.get_nodes()]]

    def exchanges_with(self, other: GeneratedKernel) -> bool:
        """Return True if one of the two reads what the other writes."""
        return bool(self.reads.keys() & other.writes.keys() or self.writes.keys() & other.reads.keys())


def regions(kernels: Sequence[GeneratedKernel], outputs: set[str]) -> list[tuple[int, int]]:
    """Return for each kernel the number of its connected region, and the bytes that the region must move."""
    parent = list(range(len(kernels)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    writer = {name: index for index, kernel in enumerate(kernels) for name in kernel.writes}
    for index, kernel in enumerate(kernels):
        for name in kernel.reads:
            if name in writer:
                parent[root(index)] = root(writer[name])
    members: dict[int, list[GeneratedKernel]] = {}
    for index, kernel in enumerate(kernels):
        members.setdefault(root(index), []).append(kernel)
    ideal = {number: _ideal_bytes(region, outputs) for number, region in members.items()}
    return [(root(index), ideal[root(index)]) for index in range(len(kernels))]


def _ideal_bytes(region: Sequence[GeneratedKernel], outputs: set[str]) -> int:
    """Return the bytes of a region's distinct inputs and outputs."""
    read = {name: size for kernel in region for name, size in kernel.reads.items()}
    written = {name: size for kernel in region for name, size in kernel.writes.items()}
    # A buffer that only this region reads would not exist if the region were a single kernel.
    kept = sum(size for name, size in written.items() if name in outputs or name not in read)
    return kept + sum(size for name, size in read.items() if name not in written)


class Reasons:
    """Inductor's reasons for not fusing scheduler nodes."""

    def __init__(self, why: Mapping[frozenset[str], Any]) -> None:
        self._why = why

    def between(self, one: GeneratedKernel, other: GeneratedKernel) -> list[str]:
        """Return the distinct reasons for not fusing two kernels; empty if Inductor never considered it."""
        pairs = (frozenset({mine, theirs}) for mine in one.node_names for theirs in other.node_names)
        return list(dict.fromkeys(_text(self._why[pair]) for pair in pairs if pair in self._why))

    def of(self, kernel: GeneratedKernel, kernels: Sequence[GeneratedKernel]) -> list[str]:
        """Return the reasons why a kernel is not fused with kernels that it exchanges data with."""
        others = [other for other in kernels if other is not kernel and kernel.exchanges_with(other)]
        texts = (f"{other.name}: {reason}" for other in others for reason in self.between(kernel, other))
        return list(dict.fromkeys(texts))[:MOST_REASONS]

    def pairs(self, kernels: Sequence[GeneratedKernel]) -> list[Pair]:
        """Return pairs of kernels that pass or share data, with counts of equal ones."""
        found: dict[tuple[str, str, str], Pair] = {}
        for first, second in _touching(kernels):
            passed = sum(size for name, size in first.writes.items() if name in second.reads)
            shared = sum(size for name, size in first.reads.items() if name in second.reads)
            reasons = self.between(first, second)
            # Pairs that only share inputs are listed only if Inductor considered fusing them.
            if passed or (shared and reasons):
                reason = "; ".join(reasons[:MOST_REASONS]) or UNSAID
                pair = Pair(first.name, second.name, 0, passed, shared, reason)
                known = found.setdefault((first.name, second.name, reason), pair)
                found[first.name, second.name, reason] = dataclasses.replace(known, count=known.count + 1)
        return list(found.values())


def _touching(kernels: Sequence[GeneratedKernel]) -> Iterator[tuple[GeneratedKernel, GeneratedKernel]]:
    """Yield kernels with each later one that reads a buffer that they read or write."""
    touched: dict[str, list[int]] = {}
    for place, kernel in enumerate(kernels):
        earlier = sorted({index for name in kernel.reads for index in touched.get(name, ())})
        for name in [*kernel.reads, *kernel.writes]:
            touched.setdefault(name, []).append(place)
        for index in earlier:
            yield kernels[index], kernel


def _text(why: Any) -> str:
    try:
        text = str(why.reason % why.args)
    except TypeError:
        text = str(why.reason)
    # Only called for kernels that do exchange data.
    return f"{text} that both index alike" if text == "no shared data" else text
