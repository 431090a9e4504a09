"""Find the sites of fusions in a graph, and say what stands in the way of replacing them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tritium.fusions.canonical import Canonicaliser
from tritium.fusions.expression import Expr, nodes_between, packs, strip_casts, strip_widening
from tritium.fusions.fusion import Fusion, Match, blamed
from tritium.fusions.patterns import ANY, Found, Pattern, traced
from tritium.graph import live_nodes, mutated_arguments, same_shape, storages, value_of


class Recogniser:
    """Find the sites of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.canon = Canonicaliser()
        self.live = live_nodes(graph)
        # The last one first: larger forms end later.
        calls = ("call_function", "call_method")
        self._nodes = [node for node in reversed(graph.nodes) if node in self.live and node.op in calls]
        self._by_form: dict[str, list[fx.Node]] = {}
        for node in self._nodes:
            self._by_form.setdefault(self.canon.of(node).op, []).append(node)
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.writes = [
            (self.position[node], storages(mutated)) for node in graph.nodes if (mutated := mutated_arguments(node))
        ]
        self.region = _autocast_regions(graph)
        # The sites of fusions that are no regions, by the node that holds their value: regions consist of these.
        self.sites: dict[fx.Node, tuple[Fusion, Match]] = {}
        # The fusion of the site that a node belongs to. Sites share no nodes with sites, nor regions with regions.
        self._owner: dict[bool, dict[fx.Node, Fusion]] = {False: {}, True: {}}

    def find(self, fusions: Sequence[Fusion]) -> list[tuple[Fusion, Match]]:
        """Return the sites of all fusions, in this order; a node is in at most one site, the last one first."""
        found = []
        for fusion in fusions:
            patterns = [thing if isinstance(thing, Pattern) else traced(thing) for thing in fusion.spellings]
            with blamed(fusion):
                for node in self._ends(patterns) if fusion.find is None else self._nodes:
                    match = self._match_at(fusion, patterns, node)
                    if match is None:
                        continue
                    self._owner[fusion.region] |= dict.fromkeys(match.nodes, fusion)
                    if not fusion.region:
                        self.sites[match.root] = (fusion, match)
                    found.append((fusion, match))
        return found

    def _ends(self, patterns: Iterable[Pattern]) -> list[fx.Node]:
        """Return the nodes at which matches of patterns can end, the last one first."""
        forms = frozenset[str]().union(*(pattern.forms for pattern in patterns))
        ends = {node for form in forms for node in self._by_form.get(form, ())}
        if forms >= ANY:
            ends.update(self.sites)
        return sorted(ends, key=self.position.__getitem__, reverse=True)

    def _match_at(self, fusion: Fusion, patterns: Sequence[Pattern], node: fx.Node) -> Match | None:
        claimed = self._owner[fusion.region]
        if node in claimed:
            return None
        if fusion.find is not None:
            match = fusion.find(self, node)
            return match if match is not None and claimed.keys().isdisjoint(match.nodes) else None
        for pattern in patterns:
            for found in self.matches(pattern, node):
                match = self._completed(fusion, node, found)
                if claimed.keys().isdisjoint(match.nodes) and fusion.accept(match):
                    return match
        return None

    def matches(self, pattern: Pattern, node: fx.Node) -> Iterator[Found]:
        """Yield the matches of a pattern that end at a node."""
        expr = self.canon.of(node)
        if expr.op in pattern.forms or (node in self.sites and pattern.forms >= ANY):
            yield from pattern.match(expr, Found(self))

    def site_at(self, expr: Any, fusion: str, *, casts: bool = True) -> Found | None:
        """Return the site of a fusion that computes a value, through identities and casts, or only lossless casts."""
        inner, last = expr, strip_casts(expr) if casts else strip_widening(expr)
        while isinstance(inner, Expr):
            owner, match = self.sites.get(inner.node, (None, None)) if inner.node is not None else (None, None)
            if owner is not None and match is not None:
                nodes = frozenset(match.nodes | nodes_between(expr, inner))
                return Found(self, match.bindings, nodes, frozenset(match.inner)) if owner.name == fusion else None
            if inner is last:
                return None
            inner = inner.args[0]
        return None

    def _completed(self, fusion: Fusion, node: fx.Node, found: Found) -> Match:
        root, nodes = node, set(found.nodes)
        if fusion.rounds:
            root, rounding = self.rounded(node)
            nodes |= rounding
        items = _items(root)
        outputs: tuple[fx.Node | None, ...] = ()
        if fusion.outputs or items:
            last = items or (root,)
            nodes |= {*last}
            covered = nodes | found.shared
            outputs = (*(self._output(fusion, found, name, covered) for name in fusion.outputs), *last)
            nodes |= {output for output in outputs if output is not None}
            root = last[0] if items else root
        return Match(root, dict(found.bindings), nodes, set(found.shared - nodes), outputs=outputs)

    def _output(self, fusion: Fusion, found: Found, name: str, covered: set[fx.Node]) -> fx.Node | None:
        """Return the node of a capture that is a result of the op, or None."""
        captured = found.bindings[name]
        node: fx.Node | None = None if captured is None else captured.node
        if node is not None and name in fusion.read_outputs and not self._is_read_outside(node, covered):
            return None
        return node

    def _is_read_outside(self, node: fx.Node, covered: set[fx.Node]) -> bool:
        """Return True if a node outside of some reads a value, or what repeats it."""
        return any(
            user not in covered or (self.canon.of(user).op in ("same", "cast") and self._is_read_outside(user, covered))
            for user in node.users
        )

    def rounded(self, node: fx.Node) -> tuple[fx.Node, set[fx.Node]]:
        """Return the last cast after a node that only rounds its value, and the nodes up to it: an op rounds once."""
        root, end, nodes, passed = node, node, set[fx.Node](), {node}
        while len(end.users) == 1:
            user = next(iter(end.users))
            source, target, expr = value_of(end), value_of(user), self.canon.of(user)
            end = user
            passed = passed | {user}
            if expr.op == "cast" and torch.promote_types(source.dtype, target.dtype) == source.dtype:
                root, nodes = user, nodes | passed
            elif expr.op != "same" or packs(expr):
                # Include an identity only if a cast follows: other fusions look through it, at the value before.
                break
        return root, nodes

    def covers(self, fusion: Fusion, match: Match) -> list[str]:
        """Return the families of the smaller sites inside a match."""
        owner = self._owner[False]
        inside = {family for node in match.nodes | match.inner if node in owner for family in owner[node].families}
        return sorted(inside.difference(fusion.families))

    def hazard(self, fusion: Fusion, match: Match) -> str | None:
        """Return why computing a match at its root would change the model's values, or compute some twice; or None."""
        nodes = match.nodes | match.inner
        first = min(self.position[node] for node in nodes)
        last = max(self.position[node] for node in (*match.values, *match.writes))
        own = {self.position[write] for write in match.writes}
        touched = storages([*match.inputs, *nodes])
        for position, written in self.writes:
            if first < position < last and position not in own and written & touched:
                return "a value is written in place between the matched operations"
        if len({self.region[node] for node in nodes}) > 1:
            return "the region crosses an autocast boundary"
        return fusion.used_elsewhere if fusion.used_elsewhere and self._is_read_inside(match) else None

    def _is_read_inside(self, match: Match) -> bool:
        """Return True if other nodes read a value inside a match that is as large as its result."""
        covered = match.nodes | match.inner
        # Nodes that only repeat a value may have other readers.
        return any(
            same_shape(getattr(value_of(node), "shape", None), match.out.shape)
            and not covered.issuperset(node.users)
            and self.canon.of(node).op not in ("same", "cast")
            for node in covered.difference(match.values)
        )


def _items(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the results of a node that has several, in order; nothing for other nodes, or if one is not read."""
    value = value_of(node)
    if not isinstance(value, tuple):
        return ()
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    complete = len(items) == len(node.users) == len(value)
    return tuple(items[index] for index in range(len(value))) if complete else ()


def _autocast_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    regions = {}
    current = 0
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            current += 1
        regions[node] = current
    return regions
