"""Find why a compiled module is outside the fidelity bound: which site, which fusion, which code.

Each probe compiles the module again, so bisection saves work here:

1. rewrite no site. Still outside: the generated code, or a pass, is at fault.
2. otherwise rewrite the first n sites of the graph and bisect over n. Site n is the first with which the result is outside.
3. let the op's reference compute that site. Inside: the provider is at fault. Otherwise run the rewritten graph without code
   generation. Outside: the rewrite is at fault; inside: the code that Inductor generates for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from tritium import compat, fidelity, fusions
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.fusions import Fusion, Match
from tritium.ops import INDUCTOR, REFERENCE
from tritium.report.ledger import LEDGER
from tritium.report.records import PassRecord, Site

Part = Literal["provider", "rewrite", "generated code", "pass", "torch.compile", "not repeated"]

NOT_SELECTED = "not among the sites that were selected"


@dataclass(frozen=True)
class Call:
    """A module, the arguments of one of its calls, and its results: eager and in float64."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    eager: Any
    exact: Any

    def excess(self, call: Callable[..., Any]) -> float | None:
        """Return the error of another implementation, in units of the bound; None if it returns no tensor."""
        args, kwargs = copied((self.args, dict(self.kwargs)))
        with torch.no_grad():
            return fidelity.largest_excess(call(*args, **kwargs), self.eager, self.exact)


def copied(arguments: Any) -> Any:
    return compat.tensors.map_tensors(lambda tensor: tensor.detach().clone(), arguments)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The cause. `fusion`, `op`, `provider`, `line` and `node` locate it, if it is a site."""

    part: Part
    explanation: str
    fusion: str | None = None
    op: str | None = None
    provider: str | None = None
    line: str | None = None
    node: str | None = None
    # True if the site is outside the bound as the only rewritten one.
    alone: bool | None = None
    # A setting that avoids the error, and whether it was tried and helped.
    remedy: str | None = None
    remedy_helps: bool | None = None

    def __str__(self) -> str:
        if self.fusion is None:
            return self.explanation
        where = f"site: {self.line}" if self.line else f"node {self.node}"
        does = "goes away without" if self.remedy_helps else "first goes out with"
        text = f"{does} fusion '{self.fusion}', provider '{self.provider}' ({where}); {self.explanation}"
        if not self.alone:
            text += "; it takes the rewritten sites before it too"
        text += f"; until that is mended: {self.remedy}"
        return text if self.remedy_helps else f"{text} (not enough: another site is at fault as well)"


class Place(NamedTuple):
    """A site in one of the graphs of a call. Compiling the same call again gives the same places."""

    graph: int
    fusion: str
    node: str


class SelectedSites(Backend):
    """Rewrite the sites at selected places only; None selects all.

    After a compilation, `rewritten` has the rewritten sites in the order of the graphs, and `passes_run` the records of
    all passes.
    """

    def __init__(self, config: CompilationConfig, places: Collection[Place] | None = None) -> None:
        self._selected = None if places is None else frozenset(places)
        self._graphs = 0
        self.rewritten: dict[Place, Site] = {}
        self.passes_run: list[PassRecord] = []
        super().__init__(config)

    def _identity(self) -> tuple[Any, ...]:
        # Never equal to another backend: reused code would leave `rewritten` empty.
        return (id(self),)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        order = {node.name: position for position, node in enumerate(gm.graph.nodes)}
        compiled = super().__call__(gm, example_inputs, **options)
        record = LEDGER.records()[-1]
        self.passes_run += record.passes
        sites = [site for site in record.sites if site.provider and site.outcome != "declined"]
        for site in sorted(sites, key=lambda site: order.get(site.node, 0)):
            self.rewritten[Place(self._graphs, site.fusion, site.node)] = site
        self._graphs += 1
        return compiled

    def all_fusions(self) -> list[Fusion]:
        known = super().all_fusions()
        return known if self._selected is None else [self._narrowed(fusion) for fusion in known]

    def _narrowed(self, fusion: Fusion) -> Fusion:
        def decline(match: Match) -> str | None:
            assert self._selected is not None
            if Place(self._graphs, fusion.name, match.root.name) not in self._selected:
                return NOT_SELECTED
            return fusion.decline(match)

        return dataclasses.replace(fusion, decline=decline)


def bisect(count: int, outside: Callable[[int], bool]) -> int:
    """Return the index of an item with which a result is outside, when it joins the items before it.

    No items are inside the bound and all `count` are outside. If a later item hides the error of an earlier one there are
    several such indices, and this is one of them.

    >>> bisect(10, lambda number: number > 6)
    6
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if outside(middle) else (middle, bad)
    return bad - 1


def find_fault(call: Call, config: CompilationConfig, dynamic: bool | None) -> Fault:
    """Find the cause for a call that is outside the bound when a backend with this configuration compiles it."""
    with compat.cached_code.recompile_limit(4096):
        return _Search(call, config, dynamic).run()


@dataclass(frozen=True)
class _Search:
    call: Call
    config: CompilationConfig
    dynamic: bool | None

    def _is_outside(self, backend: Any) -> bool:
        compiled = torch.compile(compat.modules.eager_call(self.call.module), backend=backend, dynamic=self.dynamic)
        return (self.call.excess(compiled) or 0.0) > 1

    def _is_outside_with(self, places: Collection[Place] | None, **changes: Any) -> bool:
        return self._is_outside(SelectedSites(self.config.with_(**changes), places))

    def run(self) -> Fault:
        everything = SelectedSites(self.config)
        if not self._is_outside(everything):
            return Fault(
                part="not repeated",
                explanation="compiled anew and called alone it is inside the bound: what the pipeline compiled for other calls "
                "(sizes that became dynamic) is at fault, or the result changes from call to call",
            )
        places = list(everything.rewritten)
        if not places or self._is_outside_with(()):
            return self._without_sites(everything.passes_run)
        position = bisect(len(places), lambda number: self._is_outside_with(places[:number]))
        alone = self._is_outside_with([places[position]])
        chosen = places[position : position + 1] if alone else places[: position + 1]
        return self._of_site({place: everything.rewritten[place] for place in chosen}, alone=alone)

    def _without_sites(self, passes_run: Sequence[PassRecord]) -> Fault:
        engine = self.config.engine
        if self._is_outside(engine):
            what = "torch.compile's generated code" if engine == "inductor" else "what Dynamo traces"
            return Fault(part="torch.compile", explanation=f"{what} is at fault: it is the same without Tritium")
        passes = [entry.name for entry in passes_run if entry.name != "fuse" and (entry.changed or entry.requests)]
        part: Part = "pass" if passes else "generated code"
        blamed = f"one of the passes ({', '.join(dict.fromkeys(passes))})" if passes else "the generated code"
        return Fault(part=part, explanation=f"it stays without any fusion: {blamed} is at fault")

    def _of_site(self, sites: Mapping[Place, Site], *, alone: bool) -> Fault:
        """Blame the last of these sites, the first with which the result is outside."""
        site = list(sites.values())[-1]
        op = _op_of(site)
        part, explanation = self._blame(site, sites)
        pinned = self.config.force_provider
        # A provider pinned for every op excludes one that is pinned for this op.
        remedy = {**({} if isinstance(pinned, str) else dict(pinned or ())), op: INDUCTOR}
        return Fault(
            part=part,
            explanation=explanation,
            fusion=site.fusion,
            op=op,
            provider=site.provider,
            line=site.source_line or None,
            node=site.node,
            alone=alone,
            remedy=f"CompilationConfig(force_provider={remedy!r})",
            remedy_helps=not self._is_outside_with(None, force_provider=remedy),
        )

    def _blame(self, site: Site, sites: Mapping[Place, Site]) -> tuple[Part, str]:
        op = _op_of(site)
        providers: dict[str, set[str]] = {}
        for other in sites.values():
            providers.setdefault(_op_of(other), set()).add(other.provider)
        # The same providers where all sites of an op have one, and the reference for this site's op.
        reference = {name: next(iter(found)) for name, found in providers.items() if len(found) == 1} | {op: REFERENCE}
        if site.provider != REFERENCE and not self._is_outside_with(sites, force_provider=reference):
            return "provider", f"provider '{site.provider}' of op '{op}' is at fault: its reference is inside the bound"
        if self.config.engine != "eager" and not self._is_outside_with(sites, engine="eager", force_provider=reference):
            return "generated code", "the rewrite is right: Inductor's generated code around it is at fault"
        return "rewrite", "the rewrite is at fault: it stays with the op's reference and without generated code"


def _op_of(site: Site) -> str:
    replacement = fusions.catalog()[site.fusion].replacement
    assert replacement is not None, "only a fusion with an op rewrites"
    return replacement.name
