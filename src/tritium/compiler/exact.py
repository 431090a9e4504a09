"""Which sites an op reproduces bit for bit and stride for stride, found by running the graph once on its real inputs.

Before:  the graph as Dynamo made it, run eagerly; at each site the op computes from the same inputs
After:   site by site, equal or not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.arguments import as_fake, as_value
from tritium.compiler.layouts import as_dynamo_does
from tritium.fusions import Match
from tritium.fusions.expression import same_shape, value_of

NOT_EQUAL = "fidelity is 'exact', and the replacement is not equal in bits and strides"

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
    # Whoever reads a value that lies otherwise may add in another order, as convolutions do.
    return left.dtype == right.dtype and left.stride() == right.stride() and torch.equal(left, right)


def _same_strides(match: Match, compute: Compute) -> bool:
    """Whether a replacement lies as the site's values do at every size that the graph is for, not only at this call's."""
    wanted = [value_of(node) for node in match.values]
    with as_dynamo_does(tuple(wanted)):
        made = compute(as_fake)
    return all(same_shape(one.stride(), other.stride()) for one, other in zip(made, wanted, strict=True))


def _copy(value: Any) -> Any:
    """An input for the run: a tensor's copy with the same strides, and of a symbolic size the one this call has."""
    if isinstance(value, torch.SymInt):
        hint = compat.size_hint(value)
        return value if hint is None else hint
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    copy = value.clone()
    if value.layout is not torch.strided or copy.stride() == value.stride():
        return copy
    # `clone` packs what has gaps or repeats itself: take the memory as it lies.
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((max(last + 1, 0),), (1,)).clone().as_strided(value.shape, value.stride())


def bit_equal(gm: fx.GraphModule, example_inputs: Sequence[Any], sites: Sequence[tuple[Match, Compute]]) -> list[bool]:
    """For each site whether its replacement gives the same bits and strides. The caller's tensors are not written to."""
    by_end: dict[fx.Node, list[tuple[int, Match, Compute]]] = {}
    for index, (match, compute) in enumerate(sites):
        # Strides of the others were compared when they were judged.
        if match.any_layout and not _same_strides(match, compute):
            continue
        end = max((*match.values, *match.writes))
        by_end.setdefault(end, []).append((index, match, compute))
    comparison = _Comparison(gm, by_end)
    with torch.no_grad():
        comparison.run(*map(_copy, example_inputs))
    return [comparison.equal.get(index, False) for index in range(len(sites))]
