"""Compile a zoo model once and count its sites twice, on the same graphs: by the census, and by Tritium's report."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import tritium
from census.graph import base_of, graph_calls, is_write
from census.truth import EMBEDDING, GELU_PARTS, Counts, families
from census.truth import FAMILIES as COUNTED
from support.zoo.model import ZooModel
from tritium.report import Report
from tritium.report.records import SiteCounts

# No fusion takes a norm alone.
FAMILIES = tuple(family for family in COUNTED if family != "layer_norm")
# The longest way from the operation that is counted to the end of its site: a norm over channels, with the SiLU after it.
STEPS = 5
EAGER = tritium.CompilationConfig(engine="eager")
# What a user gets by default, without generating code: every site that can be left to Inductor is.
LEFT = EAGER.with_(force_provider="inductor")


@dataclass(frozen=True)
class Configuration:
    """How a model is compiled: its dtype, whether its size is dynamic, whole or by its repeated blocks."""

    dtype: torch.dtype = torch.float32
    dynamic: bool = False
    repeated_blocks: bool = False

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch.")]
        parts += ["dynamic"] * self.dynamic + ["repeated_blocks"] * self.repeated_blocks
        return "-".join(parts)


@dataclass(frozen=True)
class Counted:
    """One live site that the census counts: its family, its node, the line it comes from.

    `near` are the nodes a few steps on, where a fusion that covers this node may end.
    """

    family: str
    node: str
    line: str
    near: frozenset[str] = frozenset()


def counted(graph: GraphModule) -> Iterator[Counted]:
    """Yield the live sites of a graph; an embedding's `linear(cat)` is of the same form as a block's."""
    merged = {EMBEDDING: "cat_linear", **dict.fromkeys(GELU_PARTS, "gelu")}
    for call, live in graph_calls(graph):
        for family in families(call) if live else ():
            statement = call.statement
            line = f"{Path(statement.file).name} in {statement.scope}: {statement.text}"
            yield Counted(merged.get(family, family), call.result.name, line, frozenset(following(call.result)))


def following(node: Node) -> set[str]:
    """Name the nodes at most `STEPS` after a node, itself included; a write leads to the tensor that is written."""
    found, edge = {node}, {node}
    for _ in range(STEPS):
        edge = {user for reached in edge for user in reached.users} - found
        edge |= {base_of(user.args[0]) for user in edge | {node} if is_write(user)}
        found |= edge
    return {reached.name for reached in found}


class Watched(tritium.Backend):
    """Tritium's backend, which lets the census count each graph before anything is done to it."""

    def __init__(self, config: tritium.CompilationConfig = EAGER) -> None:
        super().__init__(config)
        self.graphs: list[tuple[Counted, ...]] = []

    def __call__(self, graph: GraphModule, example_inputs: list[Any], **given: Any) -> Callable[..., Any]:
        self.graphs.append(tuple(counted(graph)))
        return super().__call__(graph, example_inputs, **given)


@dataclass(frozen=True)
class Measured:
    """The sites of one model in one configuration."""

    model: str
    configuration: Configuration
    graphs: tuple[tuple[Counted, ...], ...]
    report: Report

    @property
    def truth(self) -> Counts:
        counts = Counter(site.family for graph in self.graphs for site in graph)
        return {family: counts[family] for family in FAMILIES}

    @property
    def found(self) -> Counts:
        sites = self.report.sites
        return {
            family: sites[family].recognised + sites[family].declined if family in sites else 0 for family in FAMILIES
        }

    @property
    def differences(self) -> dict[str, tuple[int, int]]:
        """Truth and found, by family, where they differ."""
        truth, found = self.truth, self.found
        return {family: (truth[family], found[family]) for family in FAMILIES if truth[family] != found[family]}

    @property
    def unanswered(self) -> list[Counted]:
        """Counted sites that no site found ends near to, each of which answers for one.

        Equal numbers could hide a site that is missing behind one that is none; places cannot.
        """
        left = []
        for sites, record in zip(self.graphs, self.report.records, strict=True):
            for family in FAMILIES:
                ends = [site.node for site in record.sites if family in site.families]
                left += _unmatched([site for site in sites if site.family == family], ends)
        return left

    def places_counted(self, family: str) -> list[str]:
        """One line a site that the census counts."""
        return [f"{site.line}  (node {site.node})" for graph in self.graphs for site in graph if site.family == family]

    def places_found(self, family: str) -> list[str]:
        """One line a site that Tritium found."""
        return [
            f"{site.source_line or '(no source line)'}: {site.fusion}, node {site.node}, {site.outcome}: {site.reason}"
            for record in self.report.records
            for site in record.sites
            if family in site.families
        ]

    def complaint(self) -> str:
        """What differs, for an engineer who wants to see which site is missing or too many."""
        lines = [f"{self.model}, {self.configuration}:"]
        for family, (truth, found) in self.differences.items():
            lines.append(f"  {family}: the census counts {truth}")
            lines += [f"    {place}" for place in self.places_counted(family)]
            lines.append(f"  {family}: Tritium found {found}")
            lines += [f"    {place}" for place in self.places_found(family)]
        for site in self.unanswered:
            lines.append(f"  {site.family}: no site of its own was found for {site.line}  (node {site.node})")
        return "\n".join(lines)


def _unmatched(counted: list[Counted], ends: list[str]) -> list[Counted]:
    """The sites that are left over when as many as can be are paired with an end of their own."""
    owner: dict[int, Counted] = {}

    def place(site: Counted, tried: set[int]) -> bool:
        for index, end in enumerate(ends):
            if end in site.near and index not in tried:
                tried.add(index)
                if index not in owner or place(owner[index], tried):
                    owner[index] = site
                    return True
        return False

    return [site for site in counted if not place(site, set())]


def measure(model: ZooModel, configuration: Configuration, backend: Watched | None = None) -> Measured:
    """Compile and run a model; a second call makes a size dynamic that stock code specialises.

    So it does for blocks: they get tensors that the model around them computes, and no mark reaches those.
    """
    torch._dynamo.reset()
    # The plainest configuration stands for the default engine and is what the documentation shows; in the others the
    # replacements run, and a site may also be declined because its replacement would not be contiguous.
    backend = backend or Watched(LEFT if configuration == Configuration() else EAGER)
    module = model.build(configuration.dtype)
    compile_ = module.compile_repeated_blocks if configuration.repeated_blocks else module.compile
    compile_(backend=backend)
    inputs = model.inputs(configuration.dtype)
    marked = configuration.dynamic and bool(model.dynamic) and not configuration.repeated_blocks
    if marked:
        model.mark_dynamic(inputs)
    with torch.no_grad():
        module(**inputs)
        if configuration.dynamic and not marked:
            module(**model.inputs(configuration.dtype, size=model.sizes[1]))
    return Measured(model.name, configuration, tuple(backend.graphs), tritium.explain(module))


def stored(measured: Measured) -> dict[str, dict[str, Any]]:
    """What the documentation keeps of a measurement: per family the truth, and how the sites ended."""
    sites = measured.report.sites
    kept = {}
    for family, truth in measured.truth.items():
        counts = sites.get(family, SiteCounts())
        if truth or counts.recognised or counts.declined:
            reasons = Counter(
                site.reason
                for record in measured.report.records
                for site in record.sites
                if family in site.families and site.outcome == "declined"
            )
            kept[family] = {
                "truth": truth,
                "recognised": counts.recognised,
                "declined": counts.declined,
                "reasons": dict(sorted(reasons.items())),
            }
    return kept
