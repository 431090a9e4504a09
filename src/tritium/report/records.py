"""Records written while a graph is compiled, and about the parts of a pipeline."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from tritium import measure
from tritium.report import kernel_dump
from tritium.report.suggestions import suggest

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
class SiteCounts:
    """The outcomes of one family's sites."""

    fused: int = 0
    inductor: int = 0
    declined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def recognised(self) -> int:
        return self.fused + self.inductor

    def to_dict(self) -> dict[str, Any]:
        return {
            "fused": self.fused,
            "inductor": self.inductor,
            "declined": self.declined,
            "reasons": dict(self.reasons),
        }


@dataclass
class PassRecord:
    """The result of one pass on one graph."""

    name: str
    changed: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    declined: str | None = None
    failed: str | None = None
    # The pass's summary, if any, and the number of places it left unchanged, by reason.
    summary: str | None = None
    left_alone: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "changed": self.changed,
            "requests": self.requests,
            "seconds": round(self.seconds, 6),
            "declined": self.declined,
            "failed": self.failed,
            "summary": self.summary,
            "left_alone": self.left_alone,
        }


@dataclass(frozen=True)
class Recompile:
    """The reason why a frame was compiled again."""

    graph: str
    argument: str | None
    was: str | None
    now: str | None
    reason: str

    @property
    def suggestion(self) -> str | None:
        """The line to write to prevent this recompile, or None."""
        return suggest(self.argument, self.was, self.now, self.reason)

    def to_dict(self) -> dict[str, str | None]:
        return {**self.__dict__, "suggestion": self.suggestion}


@dataclass(frozen=True)
class Frozen:
    """A value that depends only on parameters and is computed when they change, not on every call."""

    value: str
    sources: tuple[str, ...]
    bytes: int
    declined: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "sources": list(self.sources)}


@dataclass(frozen=True)
class Failure:
    """A part of Tritium that disabled itself for one graph."""

    part: str
    reason: str
    graphs_at: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Violation:
    """Calls of a part outside of the promised shapes."""

    part: str
    what: str
    done: str
    times: int
    # The line that adds such calls to the promise, or None.
    suggestion: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class Capture:
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

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of a graph as strings, so that it keeps nothing of the model alive."""

    name: str
    target: str
    type: str
    inputs: tuple[str, ...]
    source_line: str = ""


@dataclass(frozen=True)
class Drawing:
    """A part of one graph, from Dynamo and after the passes."""

    # The path of the block in the diagram, or None if it shows the graph from the beginning.
    block: str | None
    before: tuple[DrawnNode, ...]
    after: tuple[DrawnNode, ...]
    # Number of nodes of that part that are omitted because it is too large.
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Component:
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

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Measurement:
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

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    # Operators that became generated code, and unfused pairs of kernels that exchange data.
    lowered: list[dict[str, Any]] = field(default_factory=list)
    not_fused: list[dict[str, Any]] = field(default_factory=list)
    kernels_from: Literal["codegen", "store", "none"] = "none"
    # The kernels' source code, packed by `whitebox`.
    sources: str = ""
    # Numbers of the pieces in the order of a call; empty if the graph was compiled whole.
    order: list[int] = field(default_factory=list)
    recompile: Recompile | None = None
    seconds: float = 0.0
    drawing: Drawing | None = None
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
        """Write a folder per generated kernel; see `whitebox`."""
        if not self.sources:
            return []
        inner = folder / re.sub(r"[^A-Za-z0-9_.-]+", "_", self.label).strip("_")
        return kernel_dump.write(inner, kernel_dump.unpack(self.sources), self.kernels)

    def observed(
        self, observation: Mapping[str, Any], source: Literal["codegen", "store"], piece: SharedPiece | None = None
    ) -> None:
        """Add an observation of code generation, from this or an earlier process.

        The observation of a piece is added to those of the other pieces.
        """
        if piece is None:
            self.forget_pieces()
        known = kernel_dump.unpack(self.sources) if self.sources else []
        self.sources = (
            kernel_dump.pack([*known, *kernel_dump.unpack(observation["sources"])]) if known else observation["sources"]
        )
        self.kernels = [*self.kernels, *_launched(observation["kernels"], piece, self.kernels)]
        times = piece.count if piece is not None else 1
        for name in ("fallbacks", "lowered", "not_fused"):
            setattr(self, name, [*getattr(self, name), *(_repeated(entry, times) for entry in observation[name])])
        self.kernels_from = "codegen" if "codegen" in (source, self.kernels_from) else source

    def forget_pieces(self) -> None:
        """Drop all observations of code generation, before the graph is compiled whole."""
        self.kernels, self.fallbacks, self.lowered, self.not_fused = [], [], [], []
        self.sources, self.kernels_from, self.order = "", "none", []

    def describe(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "function": self.function,
            "engine": self.engine,
            "device": self.device_type,
            "nodes": self.nodes,
            "seconds": round(self.seconds, 3),
            "needs_gradients": self.needs_gradients,
            "break_reason": self.break_reason,
            "kernels_from": self.kernels_from,
            "runs": self.runs,
        }


def _launched(
    kernels: Iterable[Mapping[str, Any]], piece: SharedPiece | None, known: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return kernels with their piece, launches per call of the graph, and renumbered regions."""
    first = 1 + max((kernel["region"] for kernel in known if kernel["region"] is not None), default=-1)
    own = {"piece": piece.number, "count": piece.count} if piece is not None else {"piece": None, "count": 1}
    return [
        {**kernel, **own, "region": kernel["region"] + first if kernel["region"] is not None else None}
        for kernel in kernels
    ]


def _repeated(entry: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return the entry of one piece, multiplied by the number of pieces that share its code."""
    counted = (
        {"arguments": {key: count * times for key, count in entry["arguments"].items()}} if "arguments" in entry else {}
    )
    return {**entry, **counted, "count": entry["count"] * times}
