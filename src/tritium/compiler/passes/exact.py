"""Find sites that an op reproduces with equal bits and strides, by running the graph on its inputs.

Before:  the graph from Dynamo runs eagerly; at each site the op also computes from the same inputs
After:   one result per site, equal or not
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.passes.channels_last.strides import as_dynamo_does
from tritium.compiler.passes.rewrite import as_fake, as_value
from tritium.fusions import Match
from tritium.graph import same_shape, value_of

NOT_EQUAL = "fidelity is 'exact', and the replacement is not equal in bits and strides"

# Computes a site's values, given a function that returns the values of its arguments.
Compute = Callable[[Callable[[Any], Any]], tuple[torch.Tensor, ...]]


class _Comparison(fx.Interpreter):
    """Run a graph, and compare each site once its values are complete."""

    def __init__(self, gm: fx.GraphModule, sites: Mapping[fx.Node, list[tuple[int, Match, Compute]]]) -> None:
        # Keep all values: a site may read inputs whose last other use is long past.
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
    # Strides count too: with other strides a reader such as a convolution may sum in another order.
    return left.dtype == right.dtype and left.stride() == right.stride() and torch.equal(left, right)


def _same_strides(match: Match, compute: Compute) -> bool:
    """Return True if a replacement has the strides of the site's values at every size of the graph."""
    wanted = [value_of(node) for node in match.values]
    with as_dynamo_does(tuple(wanted)):
        made = compute(as_fake)
    return all(same_shape(one.stride(), other.stride()) for one, other in zip(made, wanted, strict=True))


def _copy(value: Any) -> Any:
    """Copy an input for the run: a tensor with equal strides, or the current value of a symbolic size."""
    if isinstance(value, torch.SymInt):
        hint = compat.dynamo.size_hint(value)
        return value if hint is None else hint
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    copy = value.clone()
    if value.layout is not torch.strided or copy.stride() == value.stride():
        return copy
    # `clone` packs tensors with gaps or overlaps: copy the underlying memory instead.
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((max(last + 1, 0),), (1,)).clone().as_strided(value.shape, value.stride())


def bit_equal(
    gm: fx.GraphModule, example_inputs: Sequence[Any], sites: Sequence[tuple[Match, Compute, bool]]
) -> list[bool]:
    """Return for each site if its replacement has equal bits and strides; do not write to the inputs."""
    by_end: dict[fx.Node, list[tuple[int, Match, Compute]]] = {}
    for index, (match, compute, any_layout) in enumerate(sites):
        # For other sites, `fuse` has already compared the strides.
        if any_layout and not _same_strides(match, compute):
            continue
        end = max((*match.values, *match.writes))
        by_end.setdefault(end, []).append((index, match, compute))
    comparison = _Comparison(gm, by_end)
    with torch.no_grad():
        comparison.run(*map(_copy, example_inputs))
    return [comparison.equal.get(index, False) for index in range(len(sites))]
