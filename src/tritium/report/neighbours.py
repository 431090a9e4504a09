"""Generated kernels that exchange data: their regions, and Inductor's reasons for not fusing them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

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


def not_fused(
    kernels: Sequence[GeneratedKernel], why: Mapping[frozenset[str], Any]
) -> tuple[list[Pair], list[list[str]]]:
    """Return pairs of kernels that pass or share data, counted; and for each kernel why others are not fused with it.

    `why` has Inductor's reasons by the names of two scheduler nodes.
    """
    pairs: dict[tuple[str, str, str], Pair] = {}
    reasons_of: list[dict[str, None]] = [{} for _ in kernels]
    for one, other in _touching(kernels):
        first, second = kernels[one], kernels[other]
        passed = sum(size for name, size in first.writes.items() if name in second.reads)
        shared = sum(size for name, size in first.reads.items() if name in second.reads)
        nodes = (frozenset({mine, theirs}) for mine in first.node_names for theirs in second.node_names)
        reasons = list(dict.fromkeys(_text(why[pair]) for pair in nodes if pair in why))
        if passed:
            reasons_of[one] |= dict.fromkeys(f"{second.name}: {reason}" for reason in reasons)
            reasons_of[other] |= dict.fromkeys(f"{first.name}: {reason}" for reason in reasons)
        # Pairs that only share inputs are listed only if Inductor considered fusing them.
        if passed or (shared and reasons):
            key = (first.name, second.name, "; ".join(reasons[:MOST_REASONS]) or UNSAID)
            known = pairs.get(key, Pair(*key[:2], 0, passed, shared, key[2]))
            pairs[key] = dataclasses.replace(known, count=known.count + 1)
    return list(pairs.values()), [list(reasons)[:MOST_REASONS] for reasons in reasons_of]


def _touching(kernels: Sequence[GeneratedKernel]) -> Iterator[tuple[int, int]]:
    """Yield the places of kernels with each later one that reads a buffer that they read or write."""
    touched: dict[str, list[int]] = {}
    for place, kernel in enumerate(kernels):
        earlier = {at for name in kernel.reads for at in touched.get(name, ())}
        yield from ((at, place) for at in sorted(earlier))
        for name in [*kernel.reads, *kernel.writes]:
            touched.setdefault(name, []).append(place)


def _text(why: Any) -> str:
    try:
        text = str(why.reason % why.args)
    except TypeError:
        text = str(why.reason)
    # Only called for kernels that do exchange data.
    return f"{text} that both index alike" if text == "no shared data" else text
