"""Recognise sites of all fusions, choose a provider for each, and rewrite those with an owned one.

Before:  the region as the model spells it
After:   tritium::<op>(..., provider="triton")   where an owned provider was chosen; unchanged if left to Inductor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tritium import ops, tuning
from tritium.compiler.passes import rewrite
from tritium.compiler.passes.exact import NOT_EQUAL, bit_equal
from tritium.fusions import Fusion, Match
from tritium.fusions.fusion import FusionFailed, blamed
from tritium.fusions.match import Recogniser
from tritium.ops import INDUCTOR, Op
from tritium.passes import ConfigRequest, Pass, PassContext
from tritium.report.records import Outcome, Site
from tritium.tuning.choice import LEFT_TO_INDUCTOR

# Triton's own launcher costs the host about 10 us a call more than the one that Inductor uses for its kernels.
STATIC_LAUNCH = ConfigRequest(
    {"static_launch_user_defined_triton_kernels": True}, because="owned kernels are launched as generated ones are"
)


def run(graph: fx.Graph, context: PassContext) -> ConfigRequest | None:
    usable = list(context.fusions)
    while True:
        try:
            fuse(graph, context, usable)
            return STATIC_LAUNCH if has_traced_kernels(graph) else None
        except FusionFailed as failure:
            # All sites are judged before the first rewrite, so the graph is unchanged here.
            usable.remove(failure.fusion)
            context.failed.append((f"fusion {failure.fusion.name!r}", failure.error))


PASS = Pass("fuse", run)


def has_traced_kernels(graph: fx.Graph) -> bool:
    """Return True if Inductor will launch an owned Triton kernel of this graph."""
    launching = {
        (op.overload, name)
        for op in ops.catalog().values()
        for name, provider in ops.providers(op).items()
        if provider.traced
    }
    pinned = ((node.target, node.kwargs.get("provider")) for node in graph.nodes)
    return any(isinstance(provider, str) and (target, provider) in launching for target, provider in pinned)


@dataclass
class Judged:
    """The decision about one site."""

    fusion: Fusion
    match: Match
    outcome: Outcome
    reason: str
    op: Op | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    provider: str = ""
    # True if a region around this site is rewritten and replaces it.
    inside: bool = False

    @property
    def is_rewritten(self) -> bool:
        return self.op is not None and self.outcome != "declined" and not self.inside

    def decline(self, reason: str) -> None:
        self.outcome, self.reason = "declined", reason

    def compute(self, value: Callable[[Any], Any]) -> tuple[torch.Tensor, ...]:
        """Return replacements for the match's values, given the values of its arguments."""
        assert self.op is not None
        made = self.op.overload(*map(value, self.arguments.values()), provider=self.provider)
        results = self.match.read(made if isinstance(made, tuple) else (made,))
        if not self.match.shown:
            return results
        method, *arguments = self.match.shown
        return tuple(getattr(result, method)(*arguments) for result in results)


def fuse(graph: fx.Graph, context: PassContext, fusions: Iterable[Fusion]) -> None:
    recogniser = Recogniser(graph)
    # Judge all sites on the graph from Dynamo, before the first rewrite changes it.
    found = []
    for fusion, match in recogniser.find(list(fusions)):
        with blamed(fusion):
            found.append((fusion, match, _decline(fusion, match, recogniser, context)))
    judged = []
    for fusion, match, reason in found:
        with blamed(fusion):
            judged.append(_judge(fusion, match, reason, context))
    if context.config.fidelity == "exact":
        _keep_bit_equal(graph, context, [site for site in judged if site.is_rewritten])
    _take_over(judged)
    for site in judged:
        fusion, match = site.fusion, site.match
        provider = site.provider if site.is_rewritten else ""
        context.sites.append(
            Site(fusion.name, fusion.families, site.outcome, site.reason, match.root.name, match.source_line, provider)
        )

    def place(site: Judged) -> tuple[int, bool]:
        match = site.match
        return max(recogniser.position[node] for node in (*match.values, *match.writes)), site.fusion.region

    # Rewrite the last site first, so that the inputs of a site have not been replaced yet.
    for site in sorted((site for site in judged if site.is_rewritten), key=place, reverse=True):
        assert site.op is not None
        rewrite.replace(site.match, site.arguments, site.op.overload, {"provider": site.provider})


def _take_over(judged: list[Judged]) -> None:
    """Count sites inside rewritten regions as fused, in their families."""
    owner: dict[fx.Node, Judged] = {}
    for region in judged:
        if region.fusion.region and region.outcome == "fused":
            owner |= dict.fromkeys(region.match.nodes | region.match.inner, region)
    for site in judged:
        around = owner.get(site.match.root)
        if around is None or site.fusion.region or not site.match.nodes <= around.match.nodes | around.match.inner:
            continue
        site.outcome, site.inside, site.reason = "fused", True, f"part of {around.fusion.name}: {around.reason}"


def _keep_bit_equal(graph: fx.Graph, context: PassContext, sites: list[Judged]) -> None:
    if not sites:
        return
    gm = fx.GraphModule(torch.nn.Module(), graph)
    equal = bit_equal(
        gm, context.example_inputs, [(site.match, site.compute, site.fusion.any_layout(site.match)) for site in sites]
    )
    for site, same in zip(sites, equal, strict=True):
        if not same:
            site.decline(NOT_EQUAL)


def _judge(fusion: Fusion, match: Match, reason: str | None, context: PassContext) -> Judged:
    if reason is not None:
        return Judged(fusion, match, "declined", reason)
    op = fusion.replacement
    if op is None:
        return Judged(fusion, match, "inductor", LEFT_TO_INDUCTOR)
    arguments = fusion.arguments_of(match)
    fakes = {name: rewrite.as_fake(value) for name, value in arguments.items()}
    provider, why = tuning.choose(op, fakes, context.config, context.device_type)
    if provider == INDUCTOR:
        return Judged(fusion, match, "inductor", why)
    reason = rewrite.decline(match) or rewrite.changed_meta(match, op, arguments, any_layout=fusion.any_layout(match))
    if reason is not None:
        return Judged(fusion, match, "declined", reason)
    # An inlined provider becomes part of the code that Inductor generates, so its outcome is `inductor`.
    implementation = ops.providers(op).get(provider)
    outcome: Outcome = "inductor" if implementation is not None and implementation.inlined else "fused"
    return Judged(fusion, match, outcome, why, op, arguments, provider)


def _decline(fusion: Fusion, match: Match, recogniser: Recogniser, context: PassContext) -> str | None:
    off = [family for family in fusion.families if not context.config.fusion_patterns.enables(family)]
    if off:
        return f"switched off: fusion_patterns for {', '.join(off)}"
    covered = recogniser.covers(fusion, match)
    inside = [family for family in covered if not context.config.fusion_patterns.enables(family)]
    if inside:
        return f"it covers {', '.join(inside)}, switched off in fusion_patterns"
    return context.read_only or recogniser.hazard(fusion, match) or fusion.decline(match)
