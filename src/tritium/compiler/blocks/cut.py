"""Choose where to cut: the level of nesting at which the least remains to compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from tritium.compiler.blocks import find, obstacles
from tritium.compiler.blocks.facts import Facts, acts
from tritium.compiler.blocks.find import Group
from tritium.compiler.blocks.key import Key, key_of
from tritium.compiler.blocks.segments import Segment, segments_of
from tritium.compiler.blocks.tails import is_product, with_tails_moved

# With fewer equal pieces a cut does not pay: each piece costs launches and host time.
LEAST_EQUAL = 4

# The launches and host time of a piece, expressed as nodes to compile.
COST_OF_PIECE = 10

# The most cost of a cut, as a share of the graph's nodes: pieces are compiled one after another, each waiting for its kernels.
WORTH_CUTTING = 0.75

# A deeper level must cost at most this share of the level above.
WORTH_DEEPER = 0.5

# No deeper level is tried at this share of a graph's nodes.
ENOUGH = 0.25


@dataclass(eq=False)
class Piece:
    """A segment of a graph, and its key."""

    segment: Segment
    key: Key


@dataclass(eq=False)
class Cut:
    """A cut of one or more graphs into pieces."""

    pieces: list[list[Piece]]

    def __post_init__(self) -> None:
        self.count = Counter(piece.key.value for piece in self.all())

    def all(self) -> Iterator[Piece]:
        return (piece for pieces in self.pieces for piece in pieces)

    @property
    def total(self) -> int:
        """The number of pieces."""
        return sum(self.count.values())

    @property
    def equal(self) -> int:
        """The number of pieces that are equal to another."""
        return sum(count for count in self.count.values() if count > 1)

    @property
    def cost(self) -> int:
        """The number of nodes in distinct pieces, plus `COST_OF_PIECE` for every piece."""
        first = {piece.key.value: len(piece.segment.nodes) for piece in self.all()}
        return sum(first.values()) + COST_OF_PIECE * self.total


def cut(gms: Sequence[fx.GraphModule]) -> Cut | str:
    """Return the best cut of graphs that share compiled pieces, or the reason why there is none."""
    for gm in gms:
        if (reason := obstacles.of_graph(gm.graph)) is not None:
            return reason
    facts = [Facts(gm) for gm in gms]
    nodes = sum(len(own.calls) for own in facts)
    best: Cut | None = None
    reasons: dict[str, None] = {}
    for level in _levels(facts):
        groups = [find.by_period(own.calls) if level is None else find.by_modules(own.calls, level) for own in facts]
        found = _cut(facts, groups)
        if isinstance(found, str):
            reasons[found] = None
        elif found.equal < LEAST_EQUAL or found.cost > WORTH_CUTTING * nodes:
            reasons[f"{found.equal} of {found.total} pieces are equal to another"] = None
        elif best is None or found.cost <= WORTH_DEEPER * best.cost:
            best = found
        if best is not None and best.cost <= ENOUGH * nodes:
            break
    return best or "; ".join(reasons) or "it has no repeated blocks"


def _levels(facts: Sequence[Facts]) -> Iterator[int | None]:
    """Yield the levels to try: 0 (whole graphs, if several), module levels, and None (periods)."""
    if len(facts) > 1:
        yield 0
    yield from range(1, max((find.deepest_level(own.calls) for own in facts), default=0) + 1)
    yield None


def _cut(facts: Sequence[Facts], groups: Sequence[list[Group]]) -> Cut | str:
    plain = _keyed(facts, [[group.nodes for group in inner] for inner in groups])
    moved = _keyed(facts, [with_tails_moved(inner, own) for inner, own in zip(groups, facts, strict=True)])
    if isinstance(plain, str) or isinstance(moved, str):
        return plain if isinstance(moved, str) else moved
    pays = moved.equal >= min(plain.equal, LEAST_EQUAL) and _stored(facts, moved) <= _stored(facts, plain)
    return moved if pays else plain


def _keyed(facts: Sequence[Facts], groups: Sequence[list[list[fx.Node]]]) -> Cut | str:
    pieces = []
    for own, inner in zip(facts, groups, strict=True):
        segments = [segment for segment in segments_of(inner, own) if _does_something(segment)]
        if (reason := obstacles.of_cut(segments, own)) is not None:
            return reason
        pieces.append([Piece(segment, _key(segment, own)) for segment in segments])
    return Cut(pieces)


def _does_something(segment: Segment) -> bool:
    return bool(segment.outputs) or any(map(acts, segment.nodes))


def _key(segment: Segment, facts: Facts) -> Key:
    if obstacles.writes_to_inputs(segment, facts):
        # Compiling it adds guards on whether its inputs share memory; shared code would lack these guards.
        return Key(id(segment), (), is_portable=False)
    return key_of(segment, facts)


def _stored(facts: Sequence[Facts], found: Cut) -> int:
    """Return how many values are computed by a generated kernel and stored for another piece."""
    total = 0
    for own, pieces in zip(facts, found.pieces, strict=True):
        for storage in {storage for piece in pieces for storage in own.memory_of(piece.segment.inputs)}:
            maker = own.maker[storage]
            total += maker.op != "placeholder" and not is_product(maker)
    return total
