"""Which sites an op reproduces bit for bit, found by running the graph once on its real inputs.

Before:  the graph as Dynamo made it, run eagerly; at each site the op computes from the same inputs
After:   site by site, equal or not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium.compiler.arguments import as_value
from tritium.fusions import Match

NOT_EQUAL = "fidelity is 'exact', and the replacement is not bit-equal on this call's values"

# Computes a site's values from the values of its arguments.
Compute = Callable[[Callable[[Any], Any]], tuple[torch.Tensor, ...]]


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
            made = compute(lambda thing: as_value(thing, self.env))
            self.equal[index] = all(map(_same_bits, made, (self.env.get(value, result) for value in match.values)))
        return result


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def bit_equal(gm: fx.GraphModule, example_inputs: Sequence[Any], sites: Sequence[tuple[Match, Compute]]) -> list[bool]:
    """For each site whether its replacement gives the same bits. The caller's tensors are not written to."""
    by_end: dict[fx.Node, list[tuple[int, Match, Compute]]] = {}
    for index, (match, compute) in enumerate(sites):
        end = max((*match.values, *match.writes))
        by_end.setdefault(end, []).append((index, match, compute))
    comparison = _Comparison(gm, by_end)
    copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in example_inputs]
    with torch.no_grad():
        comparison.run(*copies)
    return [comparison.equal.get(index, False) for index in range(len(sites))]
