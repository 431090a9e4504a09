"""Choose where to cut: the level of nesting at which the least remains to compile, and results do not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tritium import compat
from tritium.compiler.blocks import find
from tritium.compiler.blocks.key import Key, key_of
from tritium.compiler.blocks.segments import Facts, Segment, acts, segments_of
from tritium.graph import value_of

# With fewer equal pieces a cut does not pay: each piece costs launches and host time.
LEAST_EQUAL = 4

# The launches and host time of a piece, expressed as nodes to compile.
COST_OF_PIECE = 10

# The most cost of a cut, as a share of the graph's nodes: every piece is lowered and loaded separately.
WORTH_CUTTING = 0.75

# A deeper level must cost at most this share of the level above.
WORTH_DEEPER = 0.5

# No deeper level is tried at this share of a graph's nodes.
ENOUGH = 0.25

# The types of values that pieces can exchange.
_PASSED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


@dataclass(eq=False)
class Piece:
    """A segment of a graph, and its key."""

    segment: Segment
    key: Key


@dataclass(eq=False)
class Cut:
    """A cut of one or more graphs into pieces."""

    pieces: list[list[Piece]]

    def all(self) -> Iterator[Piece]:
        return (piece for pieces in self.pieces for piece in pieces)

    @property
    def total(self) -> int:
        """The number of pieces."""
        return sum(map(len, self.pieces))

    @property
    def equal(self) -> int:
        """The number of pieces that are equal to another."""
        counts = Counter(piece.key.value for piece in self.all())
        return sum(count for count in counts.values() if count > 1)

    @property
    def cost(self) -> int:
        """The number of nodes in distinct pieces, plus `COST_OF_PIECE` for every piece."""
        first = {piece.key.value: len(piece.segment.nodes) for piece in self.all()}
        return sum(first.values()) + COST_OF_PIECE * self.total


def cut(gms: Sequence[fx.GraphModule]) -> Cut | str:
    """Return the best cut of graphs that share compiled pieces, or the reason why there is none."""
    for gm in gms:
        if (reason := decline_graph(gm.graph)) is not None:
            return reason
    facts = [Facts(gm) for gm in gms]
    nodes = sum(len(own.calls) for own in facts)
    best: Cut | None = None
    reasons: dict[str, None] = {}
    deepest = max((find.deepest_level(own.calls) for own in facts), default=0)
    # Level 0 takes whole graphs as pieces, if there are several.
    for level in range(0 if len(facts) > 1 else 1, deepest + 1):
        found = _cut(facts, [find.by_modules(own, level) for own in facts])
        if isinstance(found, str):
            reasons[found] = None
        elif found.equal < LEAST_EQUAL or found.cost > WORTH_CUTTING * nodes:
            reasons[f"{found.equal} of {found.total} pieces are equal to another"] = None
        elif best is None or found.cost <= WORTH_DEEPER * best.cost:
            best = found
        if best is not None and best.cost <= ENOUGH * nodes:
            break
    return best or "; ".join(reasons) or "it has no repeated blocks"


def _cut(facts: Sequence[Facts], groups: Sequence[list[find.Group]]) -> Cut | str:
    plain = _keyed(facts, [[group.nodes for group in inner] for inner in groups])
    moved = _keyed(facts, [find.with_tails_moved(inner, own) for inner, own in zip(groups, facts, strict=True)])
    if isinstance(plain, str) or isinstance(moved, str):
        return plain if isinstance(moved, str) else moved
    pays = moved.equal >= min(plain.equal, LEAST_EQUAL) and _stored(facts, moved) <= _stored(facts, plain)
    return moved if pays else plain


def _keyed(facts: Sequence[Facts], groups: Sequence[list[list[fx.Node]]]) -> Cut | str:
    cut = Cut([])
    for own, inner in zip(facts, groups, strict=True):
        segments = segments_of(inner, own)
        # Others do nothing.
        segments = [segment for segment in segments if segment.outputs or any(map(acts, segment.nodes))]
        if (reason := decline_cut(segments, own)) is not None:
            return reason
        cut.pieces.append([Piece(segment, _key(segment, own)) for segment in segments])
    return cut


def _key(segment: Segment, facts: Facts) -> Key:
    if not facts.of_inputs.isdisjoint(facts.written_by(segment.nodes)):
        # Compiling it adds guards on whether the graph's inputs share memory; shared code would lack these guards.
        return Key(id(segment), (), is_portable=False)
    return key_of(segment, facts)


def _stored(facts: Sequence[Facts], found: Cut) -> int:
    """Return how many values are computed by a generated kernel and stored for another piece."""
    total = 0
    for own, pieces in zip(facts, found.pieces, strict=True):
        for storage in own.memory_of(node for piece in pieces for node in piece.segment.inputs):
            maker = own.maker[storage]
            total += maker.op != "placeholder" and not find.is_product(maker)
    return total


def decline_graph(graph: fx.Graph) -> str | None:
    """Return why a graph cannot be cut anywhere, or None."""
    for node in graph.find_nodes(op="placeholder"):
        if compat.tensors.is_tensor_subclass(value_of(node)):
            return f"{node.name} is a {type(value_of(node)).__name__}: tensor subclasses are compiled whole"
    modes = ("_set_grad_enabled", "_enter_inference_mode", "set_default_dtype")
    found = next((node for node in graph.nodes if getattr(node.target, "__name__", "") in modes), None)
    return f"it switches a mode inside ({found.name})" if found is not None else None


def decline_cut(segments: Sequence[Segment], facts: Facts) -> str | None:
    """Return why cutting a graph into these segments would change its results, or None."""
    for segment in segments:
        names = [getattr(node.target, "__name__", "") for node in segment.nodes]
        if names.count("_enter_autocast") != names.count("_exit_autocast"):
            return "an autocast region begins in one piece and ends in another"
    for node in dict.fromkeys(node for segment in segments for node in segment.inputs):
        value = value_of(node)
        if not isinstance(value, _PASSED):
            return f"{node.name} would be passed between pieces, and is a {type(value).__name__}"
        if not isinstance(value, torch.SymFloat) and any(name not in facts.sizes for name in facts.symbols[node]):
            return f"the size of {node.name} is not the value of any input"
    return _lost_write(segments, facts) if facts.written else None


def _lost_write(segments: Sequence[Segment], facts: Facts) -> str | None:
    """Return how a write could be lost between values that share memory, or None."""
    written = [facts.written_by(segment.nodes) for segment in segments]
    for place, segment in enumerate(segments):
        if (pair := _pair(segment.inputs, written[place], facts)) is not None:
            return f"a piece writes to memory that two of its inputs share ({pair})"
        # Compiled code restores results that are views of inputs; a view of another result may become a separate tensor.
        later: set[int] = set().union(*written[place + 1 :]) - facts.memory_of(segment.inputs)
        if (pair := _pair(segment.outputs, later, facts)) is not None:
            return f"memory that two results of a piece share is written to later ({pair})"
    return None


def _pair(nodes: Sequence[fx.Node], written: set[int], facts: Facts) -> str | None:
    seen: dict[int, fx.Node] = {}
    for node in nodes:
        for storage in facts.storages[node] & written:
            if seen.setdefault(storage, node) is not node:
                return f"{seen[storage].name} and {node.name}"
    return None
