"""Records written while a graph is compiled, and about the parts of a pipeline."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from tritium import measure
from tritium.report import kernel_dump
from tritium.report.graph_log import file_name
from tritium.report.graph_text import GraphNode
from tritium.report.observation import Fallback, Kernel, LoweredOp, Observation, Pair, Record
from tritium.report.recompiles import Recompile

SEED_FAMILIES = ("rms_norm", "rope", "adalayernorm", "gelu", "mul_add")

Outcome = Literal["fused", "inductor", "declined"]


@dataclass(frozen=True)
class Site:
    """One place in one graph where a fusion applies."""

    fusion: str
    families: tuple[str, ...]
    outcome: Outcome
    reason: str
    node: str = ""
    source_line: str = ""
    # The provider of the op at this site; empty if nothing was rewritten.
    provider: str = ""

    def declined(self, reason: str) -> Site:
        return Site(self.fusion, self.families, "declined", reason, self.node, self.source_line)


@dataclass
class SiteCounts(Record):
    """The outcomes of one family's sites."""

    fused: int = 0
    inductor: int = 0
    declined: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, site: Site) -> None:
        setattr(self, site.outcome, getattr(self, site.outcome) + 1)
        self.reasons[site.reason] = self.reasons.get(site.reason, 0) + 1

    @property
    def recognised(self) -> int:
        return self.fused + self.inductor


@dataclass
class PassRecord(Record):
    name: str
    changed: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    declined: str | None = None
    failed: str | None = None
    # The pass's summary, if any, and the number of places it left unchanged, by reason.
    summary: str | None = None
    left_alone: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> str:
        """The requests, changes and declines, as one line of text."""
        notes = [f"{request['settings']} because {request['because']}" for request in self.requests]
        notes += [self.summary] if self.summary else []
        notes += [f"{count}x left alone: {reason}" for reason, count in self.left_alone.items()]
        notes += [f"declined: {self.declined}"] if self.declined else []
        notes += [f"FAILED: {self.failed}"] if self.failed else []
        return "; ".join(notes)


@dataclass(frozen=True)
class Frozen(Record):
    """A value that depends only on parameters and is computed when they change, not on every call."""

    value: str
    sources: tuple[str, ...]
    bytes: int
    declined: str | None = None


@dataclass(frozen=True)
class Failure(Record):
    """A part of Tritium that disabled itself for one graph."""

    part: str
    reason: str
    graphs_at: str | None = None


@dataclass(frozen=True)
class Violation(Record):
    """Calls of a part outside of the promised shapes."""

    part: str
    what: str
    done: str
    times: int
    # The line that adds such calls to the promise, or None.
    suggestion: str | None = None


@dataclass
class Capture(Record):
    """One bucket of one region: a captured graph, or the reason why there is none."""

    bucket: str
    hits: int = 0
    # Bytes of static inputs and results, plus the device memory that the capture allocated.
    bytes: int = 0
    # The number of the piece if the graph is cut at boundary ops, else None.
    piece: int | None = None
    declined: str | None = None
    # True if results are copied because a caller kept one past the next call.
    copies: bool = False


@dataclass(frozen=True)
class Diagram:
    """A part of one graph, from Dynamo and after the passes."""

    # The path of the block in the diagram, or None if it shows the graph from the beginning.
    block: str | None
    before: tuple[GraphNode, ...]
    after: tuple[GraphNode, ...]
    # Number of nodes of that part that are omitted because it is too large.
    left_out: int = 0

    @property
    def is_changed(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, kw_only=True)
class Component(Record):
    """One part of a pipeline: its time per call and the optimizations applied to it."""

    name: str
    # Median of the calls that compiled nothing; None if there were none.
    milliseconds: float | None
    calls: int
    # Share of the time of all components.
    share: float | None
    # Total seconds of the calls that compiled.
    first_call_seconds: float
    what: str
    # The data of each technique that is applied, by its name.
    techniques: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement(Record):
    """How kernel times were measured, and the limits of the machine."""

    # Calls under the profiler; times are means over them.
    calls: int
    # Milliseconds of one call without the profiler.
    call_ms: float
    # Kernels with a matching profiler event, and all kernels recorded for graphs that ran.
    timed: int
    of: int
    roofs: measure.Roofs
    # True if other processes kept the machine busy; None if unknown.
    disturbed: bool | None = None


@dataclass(frozen=True)
class SharedPiece:
    """A separately compiled piece of a graph: its number, and how often a call of the graph runs it."""

    number: int
    count: int = 1


@dataclass
class GraphRecord:
    """All information about one compiled graph."""

    graph: str
    function: str
    engine: str
    device_type: str
    nodes: int = 0
    break_reason: str | None = None
    needs_gradients: bool = False
    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    frozen: list[Frozen] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    # Regions with captured graphs, so that these can be cleared; they live as long as the compiled code.
    regions: list[weakref.ref[Any]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    lowered: list[LoweredOp] = field(default_factory=list)
    not_fused: list[Pair] = field(default_factory=list)
    kernels_from: Literal["codegen", "store", "none"] = "none"
    # The source code of the kernels, packed by `kernel_dump`, one entry per observation.
    sources: list[str] = field(default_factory=list)
    # Numbers of the pieces in the order of a call; empty if the graph was compiled whole.
    order: list[int] = field(default_factory=list)
    recompile: Recompile | None = None
    seconds: float = 0.0
    diagram: Diagram | None = None
    # Runs of the graph per measured call; None if nothing was measured.
    runs: float | None = None
    code: weakref.ref[CodeType] | None = None
    owners: tuple[weakref.ref[Any], ...] = ()
    callers: frozenset[int] = frozenset()

    def belongs_to(self, thing: object) -> bool:
        """Return True if `thing` was on the stack when this graph was compiled."""
        return any(owner() is thing for owner in self.owners)

    @property
    def lowering_failed(self) -> bool:
        """True if the graph runs eagerly because code generation failed."""
        return self.engine == "eager" and any(failure.part.startswith("lowering") for failure in self.failures)

    @property
    def label(self) -> str:
        return f"{self.function}-{self.graph}"

    def kernels_by_name(self) -> dict[str, list[Kernel]]:
        """Return the kernels by name: equal blocks generate the same kernel repeatedly."""
        named: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            named.setdefault(kernel.name, []).append(kernel)
        return named

    def why_no_kernels(self) -> str | None:
        """Return why no kernels of a graph that Inductor compiled can be dumped, or None."""
        if self.kernels_from != "none" or self.engine != "inductor":
            return None
        if self.needs_gradients:
            return "it needs gradients and was left to Inductor"
        return (
            "it was found compiled in Inductor's cache, and what was seen of its code generation is not there: "
            "clear the cache, or set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )

    def write_kernels(self, folder: Path) -> list[Path]:
        """Write a folder per generated kernel; see `kernel_dump`."""
        inner = folder / file_name(self.label)
        kernels = [kernel for packed in self.sources for kernel in kernel_dump.unpack(packed)]
        return kernel_dump.write(inner, kernels, self.kernels)

    def observed(
        self, observation: Observation, source: Literal["codegen", "store"], piece: SharedPiece | None = None
    ) -> None:
        """Add an observation of code generation, from this or an earlier process.

        The observation of a piece is added to those of the other pieces.
        """
        if piece is None:
            self.forget_pieces()
        number, count = (piece.number, piece.count) if piece is not None else (None, 1)
        region = 1 + max((kernel.region for kernel in self.kernels if kernel.region is not None), default=-1)
        self.kernels = [*self.kernels, *(kernel.in_piece(number, count, region) for kernel in observation.kernels)]
        self.fallbacks = [*self.fallbacks, *(entry.times(count) for entry in observation.fallbacks)]
        self.lowered = [*self.lowered, *(replace(entry, count=entry.count * count) for entry in observation.lowered)]
        pairs = (replace(pair, count=pair.count * count) for pair in observation.not_fused)
        self.not_fused = [*self.not_fused, *pairs]
        self.sources = [*self.sources, observation.sources]
        self.kernels_from = "codegen" if "codegen" in (source, self.kernels_from) else source

    def forget_pieces(self) -> None:
        """Drop all observations of code generation, before the graph is compiled whole."""
        self.kernels, self.fallbacks, self.lowered, self.not_fused = [], [], [], []
        self.sources, self.kernels_from, self.order = [], "none", []

    def describe(self) -> dict[str, Any]:
        names = ("graph", "function", "engine", "nodes", "needs_gradients", "break_reason", "kernels_from", "runs")
        known = {name: getattr(self, name) for name in names}
        return {**known, "device": self.device_type, "seconds": round(self.seconds, 3)}
