"""Which sites an op reproduces bit for bit, found by running the graph once on its real inputs.

Before:  the graph as Dynamo made it, run eagerly; at each site the op computes from the same inputs
After:   site by site, equal or not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium.fusions import Match
from tritium.fusions.expression import Expr

NOT_EQUAL = "fidelity is 'exact', and the replacement is not bit-equal on this call's values"

# Computes a site's value from the values of its inputs.
Compute = Callable[[Callable[[Any], Any]], torch.Tensor]


class _Comparison(fx.Interpreter):
    """Runs a graph and compares, wherever a site's value is complete."""

    def __init__(self, gm: fx.GraphModule, sites: Mapping[fx.Node, list[tuple[int, Match, Compute]]]) -> None:
        # A site reads inputs that others have used for the last time long before.
        super().__init__(gm, garbage_collect_values=False)
        self.sites = sites
        self.equal: dict[int, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for index, match, compute in self.sites.get(n, ()):
            actual = self.env[match.root] if match.writes else result
            self.equal[index] = _same_bits(compute(self._value), actual)
        return result

    def _value(self, thing: Any) -> Any:
        if isinstance(thing, list):
            return [self._value(part) for part in thing]
        if not isinstance(thing, Expr):
            return thing
        if thing.node is not None:
            return self.env[thing.node]
        view = thing.attrs[0]
        source = self._value(thing.args[0])
        rest = fx.map_arg((view.args[1:], view.kwargs), lambda node: self.env[node])
        if view.op == "call_method":
            return getattr(source, view.target)(*rest[0], **rest[1])
        return view.target(source, *rest[0], **rest[1])


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def bit_equal(gm: fx.GraphModule, example_inputs: Sequence[Any], sites: Sequence[tuple[Match, Compute]]) -> list[bool]:
    """For each site whether its replacement gives the same bits. The caller's tensors are not written to."""
    by_end: dict[fx.Node, list[tuple[int, Match, Compute]]] = {}
    for index, (match, compute) in enumerate(sites):
        by_end.setdefault(match.writes[-1] if match.writes else match.root, []).append((index, match, compute))
    comparison = _Comparison(gm, by_end)
    copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in example_inputs]
    with torch.no_grad():
        comparison.run(*copies)
    return [comparison.equal.get(index, False) for index in range(len(sites))]
