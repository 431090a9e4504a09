"""A backend that rewrites only selected sites, for finding the site that causes an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tritium import fusions
from tritium.compiler.backend import Backend
from tritium.compiler.passes import fuse
from tritium.config import CompilationConfig
from tritium.fusions import Fusion, Match
from tritium.passes import Pass
from tritium.report import LEDGER, PassRecord, Site

NOT_SELECTED = "not among the sites that were selected"


@dataclass(frozen=True)
class Place:
    """A site in one of the graphs of a call. Compiling the same call again gives the same places."""

    graph: int
    fusion: str
    node: str


class Selecting(Backend):
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

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
        order = {node.name: position for position, node in enumerate(gm.graph.nodes)}
        compiled = super().__call__(gm, example_inputs, **given)
        record = LEDGER.records()[-1]
        self.passes_run += record.passes
        sites = [site for site in record.sites if site.provider and site.outcome != "declined"]
        for site in sorted(sites, key=lambda site: order.get(site.node, 0)):
            self.rewritten[Place(self._graphs, site.fusion, site.node)] = site
        self._graphs += 1
        return compiled

    def all_passes(self) -> list[Pass]:
        if self._selected is None:
            return super().all_passes()
        narrowed = fuse.make_pass([self._narrowed(fusion) for fusion in fusions.catalog().values()])
        return [narrowed if entry.name == narrowed.name else entry for entry in super().all_passes()]

    def _narrowed(self, fusion: Fusion) -> Fusion:
        def decline(match: Match) -> str | None:
            assert self._selected is not None
            if Place(self._graphs, fusion.name, match.root.name) not in self._selected:
                return NOT_SELECTED
            return fusion.decline(match)

        return dataclasses.replace(fusion, decline=decline)
