"""Find why a compiled module is outside the fidelity bound: which site, which fusion, which code.

Each probe compiles the module again, so bisection saves work here:

1. rewrite no site. Still outside: the generated code, or a pass, is at fault.
2. otherwise rewrite the first n sites of the graph and bisect over n. Site n is the first with which the result is outside.
3. let the op's reference compute that site. Inside: the provider is at fault. Otherwise run the rewritten graph without code
   generation. Outside: the rewrite is at fault; inside: the code that Inductor generates for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tritium import compat, fidelity, fusions
from tritium.compiler.select import Place, Selecting
from tritium.config import CompilationConfig
from tritium.ops import INDUCTOR, REFERENCE
from tritium.report import Site

Part = Literal["provider", "rewrite", "generated code", "pass", "torch.compile", "not repeated"]


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
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), arguments)


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
        where = f" (site: {self.line})" if self.line else f" (node {self.node})"
        does = "goes away without" if self.remedy_helps else "first goes out with"
        text = f"{does} fusion '{self.fusion}', provider '{self.provider}'{where}; {self.explanation}"
        if not self.alone:
            text += "; it takes the rewritten sites before it too"
        if self.remedy is not None:
            text += f"; until that is mended: {self.remedy}"
            text += "" if self.remedy_helps else " (not enough: another site is at fault as well)"
        return text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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


def find(call: Call, config: CompilationConfig, dynamic: bool | None) -> Fault:
    """Find the cause for a call that is outside the bound when a backend with this configuration compiles it."""
    with compat.dynamo.many_recompiles():
        return _Search(call, config, dynamic).run()


class _Search:
    def __init__(self, call: Call, config: CompilationConfig, dynamic: bool | None) -> None:
        self._call, self._config, self._dynamic = call, config, dynamic

    def _excess(self, backend: Any) -> float:
        compiled = torch.compile(self._call.module._call_impl, backend=backend, dynamic=self._dynamic)
        return self._call.excess(compiled) or 0.0

    def _outside(self, places: Collection[Place] | None, config: CompilationConfig | None = None) -> bool:
        return self._excess(Selecting(config or self._config, places)) > 1

    def run(self) -> Fault:
        everything = Selecting(self._config)
        if self._excess(everything) <= 1:
            return Fault(
                part="not repeated",
                explanation="compiled anew and called alone it is inside the bound: what the pipeline compiled for other calls "
                "(sizes that became dynamic) is at fault, or the result changes from call to call",
            )
        sites = list(everything.rewritten.items())
        if not sites or self._outside(()):
            return self._without_sites(everything)
        places = [place for place, _ in sites]
        position = bisect(len(sites), lambda number: self._outside(places[:number]))
        place, site = sites[position]
        alone = self._outside([place])
        return self._of_site(
            site, dict(sites[position : position + 1] if alone else sites[: position + 1]), alone=alone
        )

    def _without_sites(self, tried: Selecting) -> Fault:
        plain = self._config.engine
        if self._excess(plain) > 1:
            what = "torch.compile's generated code" if plain == "inductor" else "what Dynamo traces"
            return Fault(part="torch.compile", explanation=f"{what} is at fault: it is the same without Tritium")
        passes = [
            entry.name for entry in tried.passes_run if entry.name != "fuse" and (entry.changed or entry.requests)
        ]
        if passes:
            blamed = ", ".join(dict.fromkeys(passes))
            return Fault(
                part="pass", explanation=f"it stays without any fusion: one of the passes is at fault ({blamed})"
            )
        return Fault(part="generated code", explanation="it stays without any fusion: the generated code is at fault")

    def _of_site(self, site: Site, sites: Mapping[Place, Site], *, alone: bool) -> Fault:
        op = _op_of(site.fusion)
        part, explanation = self._blame(site, op, sites)
        pinned = self._config.force_provider
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
            remedy_helps=not self._outside(None, self._config.with_(force_provider=remedy)),
        )

    def _blame(self, site: Site, op: str, sites: Mapping[Place, Site]) -> tuple[Part, str]:
        by_reference = {**_chosen(sites.values()), op: REFERENCE}
        if site.provider != REFERENCE and not self._outside(
            list(sites), self._config.with_(force_provider=by_reference)
        ):
            return "provider", f"provider '{site.provider}' of op '{op}' is at fault: its reference is inside the bound"
        if self._config.engine != "eager" and not self._outside(
            list(sites), self._config.with_(engine="eager", force_provider=by_reference)
        ):
            return "generated code", "the rewrite is right: Inductor's generated code around it is at fault"
        return "rewrite", "the rewrite is at fault: it stays with the op's reference and without generated code"


def _chosen(sites: Iterable[Site]) -> dict[str, str]:
    """Map each op to its provider, if all of its sites have the same one."""
    found: dict[str, set[str]] = {}
    for site in sites:
        found.setdefault(_op_of(site.fusion), set()).add(site.provider)
    return {op: providers.pop() for op, providers in found.items() if len(providers) == 1}


def _op_of(fusion: str) -> str:
    replacement = fusions.catalog()[fusion].replacement
    assert replacement is not None, "only a fusion with an op rewrites"
    return replacement.name
