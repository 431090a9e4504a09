"""Match the spellings of fusions in the canonical expressions of a graph."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium.fusions.canonical import movement, operators
from tritium.fusions.expression import (
    Canonicaliser,
    Expr,
    is_number,
    is_scalar,
    nodes_between,
    packs,
    strip_casts,
    strip_in_place,
    strip_same,
    strip_widening,
)
from tritium.fusions.fusion import Fusion, Match, blamed
from tritium.graph import live_nodes, mutated_arguments, storages, value_of

# Importing these modules fills the table of canonical forms.
FORMS = (movement, operators)

COMMUTATIVE = frozenset({"add", "mul"})


@dataclass(frozen=True)
class Wild:
    """A parameter of a spelling: matches any tensor, or any number."""

    name: str
    number: bool


@functools.cache
def pattern_of(spelling: Callable[..., Any]) -> Any:
    """Return a spelling in canonical form, with wildcards for its parameters."""
    graph = fx.symbolic_trace(spelling).graph
    parameters = inspect.signature(spelling, eval_str=True).parameters
    canon = Canonicaliser()
    output = next(node for node in graph.nodes if node.op == "output")

    def freeze(thing: Any) -> Any:
        if not isinstance(thing, Expr):
            return thing
        if thing.node is not None and thing.node.op == "placeholder":
            name = str(thing.node.target)
            return Wild(name, number=parameters[name].annotation is float)
        return Expr(thing.op, tuple(map(freeze, thing.args)), attrs=thing.attrs)

    return freeze(strip_casts(canon.of(output.args[0])))


State = tuple[dict[str, Any], frozenset[fx.Node]]


def _match(pattern: Any, target: Any, state: State) -> Iterator[State]:
    """Yield all ways to match `target` with `pattern`."""
    bindings, nodes = state
    if isinstance(pattern, Wild):
        yield from _bind(pattern, target, state)
        return
    if not isinstance(pattern, Expr):
        if not isinstance(target, Expr) and is_number(target) and target == pattern:
            yield state
        return
    if not isinstance(target, Expr):
        return
    inner = strip_casts(target)
    if pattern.op == "cast":
        yield from _match(pattern.args[0], target, state)
        return
    if inner.op != pattern.op or inner.attrs != pattern.attrs or len(inner.args) != len(pattern.args):
        return
    own = nodes | nodes_between(target, inner) | (frozenset({inner.node}) if inner.node is not None else frozenset())
    orders = [inner.args]
    if pattern.op in COMMUTATIVE:
        orders.append(inner.args[::-1])
    for args in orders:
        yield from _match_all(pattern.args, args, (bindings, own))


def _match_all(patterns: Sequence[Any], targets: Sequence[Any], state: State) -> Iterator[State]:
    if not patterns:
        yield state
        return
    for found in _match(patterns[0], targets[0], state):
        yield from _match_all(patterns[1:], targets[1:], found)


def _bind(wild: Wild, target: Any, state: State) -> Iterator[State]:
    bindings, nodes = state
    if wild.number:
        inner = strip_same(target)
        if not is_scalar(inner):
            return
    else:
        if not isinstance(target, Expr):
            return
        inner = strip_in_place(target)
        nodes = nodes | nodes_between(target, inner)
        if inner.node is None or not isinstance(value_of(inner.node), torch.Tensor):
            return
    known = bindings.get(wild.name)
    if known is None:
        yield {**bindings, wild.name: inner}, nodes
    elif same_value(known, inner):
        yield state[0], nodes


def same_value(left: Any, right: Any) -> bool:
    """Return True if two expressions are one value, except for casts that lose nothing."""
    left, right = strip_widening(left), strip_widening(right)
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return not isinstance(left, Expr) and not isinstance(right, Expr) and left == right
    return left is right or (left.node is not None and left.node is right.node)


class Recogniser:
    """Find the sites of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.canon = Canonicaliser()
        self.live = live_nodes(graph)
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.writes = [
            (self.position[node], storages(mutated)) for node in graph.nodes if (mutated := mutated_arguments(node))
        ]
        self.region = _autocast_regions(graph)
        # Sites share no nodes with sites, nor regions with regions.
        self._claimed: dict[bool, set[fx.Node]] = {False: set(), True: set()}
        # The sites found so far, by the node that holds their value: regions consist of these.
        self.sites: dict[fx.Node, tuple[Fusion, Match]] = {}

    def find(self, fusions: Sequence[Fusion]) -> list[tuple[Fusion, Match]]:
        """Return the sites of all fusions, larger and stricter spellings first; a node is in at most one site."""
        found = []
        for fusion in sorted(fusions, key=_rank):
            for node in reversed(self.graph.nodes):
                with blamed(fusion):
                    match = self._match_at(fusion, node)
                if match is not None:
                    self._claimed[fusion.region] |= match.nodes
                    if not fusion.region:
                        self.sites[match.root] = (fusion, match)
                    found.append((fusion, match))
        return found

    def site_at(self, expr: Any, *names: str) -> Match | None:
        """Return the site of a fusion in `names` that computes a value, through casts and identities."""
        while isinstance(expr, Expr):
            if expr.node is not None and expr.node in self.sites:
                fusion, match = self.sites[expr.node]
                return match if fusion.name in names else None
            if expr.op not in ("same", "cast"):
                return None
            expr = expr.args[0]
        return None

    def _match_at(self, fusion: Fusion, node: fx.Node) -> Match | None:
        claimed = self._claimed[fusion.region]
        if node not in self.live or node in claimed or node.op not in ("call_function", "call_method"):
            return None
        expr = self.canon.of(node)
        if expr.op in ("same", "cast", "opaque") and not fusion.region:
            return None
        if fusion.find is not None:
            match = fusion.find(self, node)
            return match if match is not None and not match.nodes & claimed else None
        for match in self.spelled(fusion.spellings, node):
            closed = self.closed(match)
            if not closed.nodes & claimed and fusion.accept(closed):
                return closed
        return None

    def spelled(self, spellings: Sequence[Callable[..., Any]], node: fx.Node) -> Iterator[Match]:
        """Yield the matches of a node's value with some spellings."""
        expr = strip_same(self.canon.of(node))
        for spelling in spellings:
            pattern = pattern_of(spelling)
            if pattern.op == expr.op:
                for bindings, nodes in _match(pattern, expr, ({}, frozenset())):
                    yield Match(node, bindings, set(nodes))

    def closed(self, match: Match) -> Match:
        """Return a match extended over casts that only round the result: the op rounds once, at the end."""
        root, nodes, passed = match.root, match.nodes, {match.root}
        end = root
        while len(end.users) == 1:
            user = next(iter(end.users))
            source, target, op = value_of(end), value_of(user), self.canon.of(user).op
            end = user
            passed = passed | {user}
            if op == "cast" and torch.promote_types(source.dtype, target.dtype) == source.dtype:
                root, nodes = user, nodes | passed
            elif op != "same" or packs(self.canon.of(user)):
                # Include an identity only if a cast follows: other fusions look through it, at the value before.
                break
        return dataclasses.replace(match, root=root, nodes=nodes)

    def source(self, expr: Expr, passed: set[fx.Node]) -> Expr:
        """Return the value that an expression repeats in the same layout; add nodes in between to `passed`."""
        while expr.op == "same" and expr.node is not None and not packs(expr):
            passed.add(expr.node)
            expr = expr.args[0]
        return expr

    def hazard(self, match: Match) -> str | None:
        """Return why computing the region at its root would read values other than the model's, or None."""
        nodes = match.nodes | match.inner
        first = min(self.position[node] for node in nodes)
        last = max(self.position[node] for node in (*match.values, *match.writes))
        own = {self.position[write] for write in match.writes}
        touched = storages([*match.inputs, *nodes])
        for position, written in self.writes:
            if first < position < last and position not in own and written & touched:
                return "a value is written in place between the matched operations"
        regions = {self.region[node] for node in nodes}
        if len(regions) > 1:
            return "the region crosses an autocast boundary"
        return None


def _rank(fusion: Fusion) -> tuple[bool, int, int, int, str]:
    """Return the sort key: of two spellings of one size, the one with fewer wildcards comes first."""

    def size(thing: Any) -> int:
        return 1 + sum(map(size, thing.args)) if isinstance(thing, Expr) else 0

    def wildcards(thing: Any) -> set[str]:
        if isinstance(thing, Wild):
            return {thing.name}
        return set().union(*map(wildcards, thing.args)) if isinstance(thing, Expr) else set()

    largest = max((pattern_of(spelling) for spelling in fusion.spellings), key=size, default=None)
    return fusion.region, -fusion.priority, -size(largest), len(wildcards(largest)), fusion.name


def _autocast_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    regions = {}
    current = 0
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            current += 1
        regions[node] = current
    return regions
