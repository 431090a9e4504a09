"""Replacements keep numerics: each family's alone, and all together, on every model of the zoo.

Error is measured against the model in float64 with the same weights and inputs; eager's own error is the yardstick.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tritium
from census.measure import EAGER
from support.fidelity import assert_no_worse
from support.zoo import ZOO
from tritium import fusions
from tritium.config import switch_of
from tritium.report.ledger import LEDGER
from tritium.report.records import Site

EVERYTHING = "everything"
SWITCHES = tuple(field.name for field in dataclasses.fields(tritium.FusionPatterns))


REGIONS = {switch_of(family) for fusion in fusions.catalog().values() if fusion.region for family in fusion.families}
ALONE = {switch: tritium.FusionPatterns(**{name: name == switch for name in SWITCHES}) for switch in SWITCHES}


def with_covered(region: str) -> tritium.FusionPatterns:
    """A region's switch, and those of all that a region may cover."""
    return tritium.FusionPatterns(**{name: name == region or name not in REGIONS for name in SWITCHES})


def rewritten(sites: Iterable[Site]) -> set[str]:
    """The switches of what was replaced by an op, or is part of a region that was."""
    return {switch_of(family) for site in sites if site.outcome == "fused" for family in site.families}


class Alternatives:
    """A backend that compiles each graph with all switches on, then with each that matters alone.

    One trace of the model serves them all: `chosen` says which the next call runs.
    """

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        self.chosen = EVERYTHING
        self.sites: dict[str, list[Site]] = {}

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        made: dict[str, Callable[..., Any]] = {}
        made[EVERYTHING], sites = self._compile(EVERYTHING, tritium.FusionPatterns(), graph, example_inputs)
        for switch in sorted(rewritten(sites)) if self.one_by_one else ():
            made[switch], alone = self._compile(switch, ALONE[switch], graph, example_inputs)
            # A region covers sites of other families, whose switches must then be on too.
            if switch in REGIONS and not rewritten(alone):
                made[switch], _ = self._compile(switch, with_covered(switch), graph, example_inputs)
            elif not rewritten(alone):
                # Declined on its own, as SD3's q/k norms are: their values are not contiguous.
                del made[switch], self.sites[switch]
        return lambda *args: made.get(self.chosen, graph.forward)(*args)

    def _compile(
        self, choice: str, patterns: tritium.FusionPatterns, graph: GraphModule, example_inputs: list[Any]
    ) -> tuple[Callable[..., Any], list[Site]]:
        compiled = tritium.Backend(EAGER.with_(fusion_patterns=patterns))(duplicate(graph), example_inputs)
        sites = LEDGER.records()[-1].sites
        self.sites.setdefault(choice, []).extend(sites)
        return compiled, sites


def duplicate(module: GraphModule) -> GraphModule:
    """A copy whose graph can be rewritten; its values are the same."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


@torch.no_grad()
def outputs(module, inputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(module(**inputs)) if isinstance(leaf, torch.Tensor)]


class Widening(TorchFunctionMode):
    """Lets float64 through where a model (Cosmos, Kandinsky 5) insists on float32, and else would raise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.linalg.vector_norm:
            kwargs.pop("dtype", None)
        if func is torch.nn.functional.linear:
            args = (args[0].to(args[1].dtype), *args[1:])
        return func(*args, **kwargs)


def in_double(module, inputs) -> list[torch.Tensor]:
    """The outputs in float64. What stock code computes in float32 (tables of angles, mostly) stays so in every run."""
    double = torch.nn.Module.to(copy.deepcopy(module), torch.float64)
    widened = tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, inputs)
    with Widening():
        return [leaf.double() for leaf in outputs(double, widened)]


@functools.cache
def run_all(name: str, dtype: torch.dtype, *, one_by_one: bool):
    module, inputs = ZOO[name].build(dtype), ZOO[name].inputs(dtype)
    exact, eager = in_double(module, inputs), outputs(module, inputs)
    backend = Alternatives(one_by_one=one_by_one)
    module.compile(backend=backend)
    found = {EVERYTHING: outputs(module, inputs)}
    for choice in backend.sites.keys() - {EVERYTHING}:
        backend.chosen = choice
        found[choice] = outputs(module, inputs)
    return found, eager, exact, backend.sites


def complaints(found, eager, exact) -> list[str]:
    lines = []
    for choice, actual in found.items():
        for index, leaves in enumerate(zip(actual, eager, exact, strict=True)):
            try:
                assert_no_worse(*leaves)
            except AssertionError as error:
                lines.append(f"{choice}, output {index}: {error}")
    return lines


# Models that have every family between them: one family after the other in float32, and all at once. The others, and some of
# these, are checked all at once in half precision. Both for all of them where time does not matter.
DIFFERENT = ("flux", "qwen_image", "wan", "ltx", "pixart", "stable_audio", "kl_decoder", "wan_decoder")
# In half precision: two of these, which have every family with the others; not the models that take longest, of whose kind another
# is checked (the UNet's GroupNorms are those of the decoder).
LONGER = {"ltx2", "sdxl_unet", "mochi", "lumina2", "chroma", "flux2", "kandinsky5", "hidream"}
LEFT_OUT = ({*DIFFERENT} | LONGER) - {"flux", "kl_decoder"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.thorough) for name in ZOO]
)
def test_each_family_alone_keeps_the_numbers(name):
    found, eager, exact, sites = run_all(name, torch.float32, one_by_one=True)
    assert len(found) > 1
    assert found.keys() - {EVERYTHING} <= rewritten(sites[EVERYTHING])
    assert len(rewritten(sites[EVERYTHING]) - found.keys()) <= 1
    for choice in found.keys() - {EVERYTHING}:
        assert choice in rewritten(sites[choice])
        assert choice in REGIONS or rewritten(sites[choice]) == {choice}
    assert not complaints(found, eager, exact)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in LEFT_OUT else ()) for name in ZOO],
)
def test_all_families_keep_the_numbers_in_half_precision(name):
    found, eager, exact, sites = run_all(name, torch.bfloat16, one_by_one=False)
    assert rewritten(sites[EVERYTHING])
    assert not complaints(found, eager, exact)


def test_a_replacement_that_is_wrong_is_noticed():
    """RMSNorm alone, inexact by one part in ten thousand."""
    found, eager, exact, _ = run_all("flux", torch.float32, one_by_one=True)
    spoiled = {**found, "enable_rms_norm": [value * (1 + 1e-4) for value in found["enable_rms_norm"]]}
    assert [line.split(",")[0] for line in complaints(spoiled, eager, exact)] == ["enable_rms_norm"]
