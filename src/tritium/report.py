"""What was done, declined, and why.

A `GraphRecord` is written while one graph is compiled and belongs to that compiled code; `LEDGER` keeps them for the
process; a `Report` is a view over the records of one model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from tritium import compat, device, measure, whitebox
from tritium.errors import ReportError

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
    # Who computes the op that stands here now; empty where nothing was rewritten.
    provider: str = ""

    def declined(self, reason: str) -> Site:
        return Site(self.fusion, self.families, "declined", reason, self.node, self.source_line)


@dataclass
class SiteCounts:
    """How the sites of one family ended."""

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
    """One pass over one graph."""

    name: str
    changed: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    declined: str | None = None
    failed: str | None = None
    # What it did, where it says so, and how many places it left alone for which reasons.
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
    """Why a frame was compiled once more."""

    graph: str
    argument: str | None
    was: str | None
    now: str | None
    reason: str

    @property
    def suggestion(self) -> str | None:
        """What to write so that this does not happen; None where nothing would help."""
        return suggest(self.argument, self.was, self.now, self.reason)

    def to_dict(self) -> dict[str, str | None]:
        return {**self.__dict__, "suggestion": self.suggestion}


_SIZE = re.compile(r"size (\d+) at dim (\d+)")


def suggest(argument: str | None, was: str | None, now: str | None, reason: str) -> str | None:
    """The line that prevents a recompile.

    >>> suggest("encoder_hidden_states", "size 128 at dim 1", "size 512 at dim 1", "")
    'Plan(shapes=Shapes(..., text_tokens=[128, 512])), or dynamic_dims={"encoder_hidden_states": [1]}'
    """
    if argument is not None and (shape := _suggest_shape(argument, was, now)) is not None:
        return shape
    if now == "inference tensor" or was == "inference tensor" or "GLOBAL_STATE" in reason or "grad_mode" in reason:
        return "make every call, and handle.warmup(), in one mode: with torch.inference_mode():"
    if "requires_grad mismatch" in reason:
        return "freeze the weights before warmup(): model.requires_grad_(False); loading a LoRA freezes them otherwise"
    if "peft." in reason or "lora_" in reason or "merged_adapters" in reason or (argument and ".scaling[" in argument):
        return "load LoRAs and set their scales before handle.warmup(), or merge them: pipe.fuse_lora()"
    if reason.startswith("___check_type_id(self"):
        return "replace modules, as loading a LoRA does, before handle.warmup()"
    if argument is None:
        return None
    if was is not None and was.startswith("stride"):
        return f"pass {argument} in one memory layout"
    if was is not None and "dtype" in was:
        return f"pass {argument} in one dtype"
    if re.search(rf"{re.escape(argument)}.* is None|is not None|NoneType", reason) or now == "None":
        return f"pass {argument} always, or never"
    if was is not None and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False|'.*'", was):
        return f"pass {argument} as a tensor if it changes from call to call"
    return None


def _suggest_shape(argument: str, was: str | None, now: str | None) -> str | None:
    sizes = [_SIZE.fullmatch(text or "") for text in (was, now)]
    if sizes[0] is None or sizes[1] is None:
        return None
    first, second, dim = sizes[0][1], sizes[1][1], sizes[0][2]
    shapes = "Shapes(sizes=[...])"
    if dim == "0":
        shapes = f"Shapes(..., batch=[{first}, {second}])"
    elif "encoder" in argument or "txt" in argument or "prompt" in argument:
        shapes = f"Shapes(..., text_tokens=[{first}, {second}])"
    return f'Plan(shapes={shapes}), or dynamic_dims={{"{argument}": [{dim}]}}'


@dataclass(frozen=True)
class Folded:
    """A value that depends on parameters alone and is computed when they change instead of on every call."""

    value: str
    sources: tuple[str, ...]
    bytes: int
    declined: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "sources": list(self.sources)}


@dataclass(frozen=True)
class Failure:
    """A part that turned itself off for one graph."""

    part: str
    reason: str
    graphs_at: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Violation:
    """Calls of a part outside of the shapes that were promised."""

    part: str
    what: str
    done: str
    times: int

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass
class Capture:
    """One bucket of one region: a recording that is replayed, or the reason why there is none."""

    bucket: str
    hits: int = 0
    # Static inputs and results, and what the recording took of the device's memory besides.
    bytes: int = 0
    # Which piece of a graph that is cut at boundary ops; None for a whole graph.
    piece: int | None = None
    declined: str | None = None
    # Whether results are copied, because a caller held one over the next call.
    copies: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of a graph as words: nothing of the model stays alive through it."""

    name: str
    target: str
    type: str
    inputs: tuple[str, ...]
    source_line: str = ""


@dataclass(frozen=True)
class Drawing:
    """A part of one graph as Dynamo made it and as the passes left it."""

    # The path of the block that is drawn, or None for the graph from its beginning.
    block: str | None
    before: tuple[DrawnNode, ...]
    after: tuple[DrawnNode, ...]
    # Nodes of that part that are not drawn, because it is too large.
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of a pipeline: how long a call of it takes, and what was done to it."""

    name: str
    # The median of its calls in which nothing was compiled; None if there were none.
    milliseconds: float | None
    calls: int
    # Of the time in all components.
    share: float | None
    # The seconds of the calls that compiled.
    first_call_seconds: float
    what: str

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Measurement:
    """How the kernels' times were measured, and what the machine reaches at best."""

    # Calls under the profiler; times are means over them.
    calls: int
    # One call by the clock, without the profiler.
    call_ms: float
    # Kernels that the profiler's events could be attributed to, of all that are recorded for graphs that ran.
    timed: int
    of: int
    roofs: measure.Roofs
    # Whether others kept the machine busy meanwhile; None where nobody tells.
    disturbed: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class GraphRecord:
    """Everything known about one compiled graph."""

    graph: str
    function: str
    engine: str
    device_type: str
    nodes: int = 0
    break_reason: str | None = None
    needs_gradients: bool = False
    sites: list[Site] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    folded: list[Folded] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    # The regions that hold the recordings, for whoever wants to clear them; they live as long as the compiled code.
    regions: list[weakref.ref[Any]] = field(default_factory=list)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    # Operators that became generated code, and pairs of kernels that exchange data and are two.
    lowered: list[dict[str, Any]] = field(default_factory=list)
    not_fused: list[dict[str, Any]] = field(default_factory=list)
    kernels_from: Literal["codegen", "store", "none"] = "none"
    # The kernels' texts, packed by `whitebox`.
    sources: str = ""
    recompile: Recompile | None = None
    seconds: float = 0.0
    drawing: Drawing | None = None
    # How often the graph ran in one measured call; None where nothing was measured.
    runs: float | None = None
    code: weakref.ref[CodeType] | None = None
    owners: tuple[weakref.ref[Any], ...] = ()
    callers: frozenset[int] = frozenset()

    def belongs_to(self, thing: object) -> bool:
        """Whether `thing` was on the stack when this graph was compiled."""
        return any(owner() is thing for owner in self.owners)

    @property
    def label(self) -> str:
        return f"{self.function}-{self.graph}"

    def why_no_kernels(self) -> str | None:
        """Why there is nothing to dump although Inductor compiled the graph; None where there is, or nothing was asked."""
        if self.kernels_from != "none" or self.engine != "inductor":
            return None
        if self.needs_gradients:
            return "it needs gradients and was left to Inductor"
        return (
            "it was found compiled in Inductor's cache, and what was seen of its code generation is not there: "
            "clear the cache, or set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )

    def write_kernels(self, folder: Path) -> list[Path]:
        """A folder for each generated kernel, see `whitebox`."""
        if not self.sources:
            return []
        inner = folder / re.sub(r"[^A-Za-z0-9_.-]+", "_", self.label).strip("_")
        return whitebox.write(inner, whitebox.unpack(self.sources), self.kernels)

    def observed(self, observation: Mapping[str, Any], source: Literal["codegen", "store"]) -> None:
        """Take over what was seen of the code generation, now or in an earlier process."""
        for name in ("kernels", "fallbacks", "lowered", "not_fused", "sources"):
            setattr(self, name, observation[name])
        self.kernels_from = source

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


# Told the function of a graph when its compilation begins (None) and when it ends (the seconds it took).
CompilationObserver = Callable[[str, float | None], None]

# Graphs of this process that keep a drawing, at most about 200 KB each; later ones are counted, not drawn.
MOST_DRAWINGS = 16


# Pairs of kernels that the text of a report shows; the data has all.
MOST_PAIRS = 20


class Ledger:
    """The records of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[GraphRecord] = []
        self._limits: list[compat.LimitReached] = []
        self._observers: list[CompilationObserver] = []
        # By the graph that was traced: who computes which attention.
        self._attention: dict[str, dict[tuple[str, str], None]] = {}
        self._sparse: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def observed(self, observer: CompilationObserver) -> Iterator[None]:
        """Tell an observer what is compiled inside."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def begin(self, record: GraphRecord) -> None:
        """A graph is about to be compiled."""
        for observer in self._observers:
            observer(record.function, None)

    def add(self, record: GraphRecord) -> None:
        """A graph was compiled."""
        for observer in self._observers:
            observer(record.function, record.seconds)
        with self._lock:
            # A restarted analysis compiles the same graph again: the later record is the true one.
            self._records = [
                kept for kept in self._records if not (kept.graph == record.graph and kept.code == record.code)
            ]
            if sum(kept.drawing is not None for kept in self._records) >= MOST_DRAWINGS:
                record.drawing = None
            self._records.append(record)

    def limit_reached(self, limit: compat.LimitReached) -> None:
        with self._lock:
            self._limits.append(limit)

    def attention_chosen(self, graph: str, by: str, what: str) -> None:
        """While a graph was traced, this was chosen to compute an attention; a graph is traced several times."""
        with self._lock:
            self._attention.setdefault(graph, {})[by, what] = None

    def watch_sparse(self, attention: Any) -> None:
        """Show a sparse attention's `summary()` in reports, for as long as it lives."""
        self._sparse.add(attention)

    def attention_of(self, records: Sequence[GraphRecord]) -> list[dict[str, Any]]:
        """Who computes the attentions of some graphs, and how sparse those are that this process computes sparsely."""
        with self._lock:
            chosen = [(record.graph, *pair) for record in records for pair in self._attention.get(record.graph, ())]
        found: list[dict[str, Any]] = [{"graph": graph, "by": by, "what": what} for graph, by, what in chosen]
        sparse = [attention.summary() for attention in list(self._sparse)]
        return found + [summary for summary in sparse if summary is not None]

    def records(self) -> list[GraphRecord]:
        """Records whose code is still alive, oldest first."""
        with self._lock:
            self._records = [kept for kept in self._records if kept.code is None or kept.code() is not None]
            return list(self._records)

    def limits(self) -> list[compat.LimitReached]:
        """Every recompile limit that was reached, oldest first."""
        with self._lock:
            return list(self._limits)

    def limits_of(self, records: Sequence[GraphRecord]) -> list[compat.LimitReached]:
        places = set()
        for record in records:
            code = record.code() if record.code is not None else None
            if code is not None:
                places.add((code.co_name, code.co_filename, code.co_firstlineno))
        with self._lock:
            return [limit for limit in self._limits if (limit.function, limit.file, limit.line) in places]

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self._limits.clear()
            self._attention.clear()


LEDGER = Ledger()


_MISMATCH = re.compile(
    r"tensor '(?P<argument>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<index>\d+))?\. "
    r"expected (?P<was>.+), actual (?P<now>.+?)(?:$|[.\n])"
)
_EQUALITY = re.compile(r"^(?P<argument>[A-Za-z_][\w.\[\]']*) == (?P<was>.+)$")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Something of the module itself, in Dynamo's spelling.
_INSIDE = re.compile(r"self(?:\._(?:modules|parameters|buffers)\['[^']+'\]|\.\w+(?:\['[^']+'\])?)+")


def parse_guard_failure(graph: str, text: str, arguments: Mapping[str, Any]) -> Recompile:
    """Dynamo's sentence about a failed guard as argument, was and now.

    >>> parse_guard_failure("0/1", "0/0: tensor 'x' size mismatch at index 1. expected 8, actual 16", {})
    Recompile(graph='0/1', argument='x', was='size 8 at dim 1', now='size 16 at dim 1', reason="tensor 'x' size mismatch at index 1. expected 8, actual 16")
    """
    first = re.sub(r"^\d+/\d+(?:_\d+)?: ", "", text.splitlines()[0])
    reason = first.split("  #")[0].strip()
    mismatch = _MISMATCH.search(reason)
    if mismatch is not None:
        what, index = mismatch["what"], mismatch["index"]
        place = f" at dim {index}" if index is not None else ""
        values = [f"{what} {mismatch[key].strip()}{place}" for key in ("was", "now")]
        if what == "dispatch key set":
            # The only key that ordinary use changes: a tensor made under inference_mode lacks it.
            values = ["normal tensor" if "ADInplaceOrView" in value else "inference tensor" for value in values]
        return Recompile(graph, _argument_name(mismatch["argument"]), values[0], values[1], reason)
    if reason.startswith("GLOBAL_STATE changed"):
        return Recompile(graph, None, None, None, reason)
    equality = _EQUALITY.match(reason)
    inside = _INSIDE.search(reason)
    if inside is not None:
        was = equality["was"].strip() if equality is not None else None
        return Recompile(graph, _inner_name(inside[0]), was, None, reason)
    named = next((name for name in _NAME.findall(reason) if name in arguments), None)
    argument = equality["argument"] if equality is not None else named
    if argument is None:
        return Recompile(graph, None, None, None, reason)
    was = equality["was"].strip() if equality is not None else None
    now = _brief(arguments[argument]) if argument in arguments else None
    return Recompile(graph, _argument_name(argument), was, now, reason)


def _argument_name(text: str) -> str:
    """`hidden_states` for `kwargs['hidden_states']`: a decorator around forward hides the name otherwise."""
    return re.sub(r"^(?:kw)?args\['?([\w.]+)'?\]", r"\1", text)


def _inner_name(path: str) -> str:
    """A place inside of a module as a user writes it.

    >>> _inner_name("self._modules['attn']._modules['to_q'].scaling['one']")
    "attn.to_q.scaling['one']"
    """
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path).removeprefix("self.")


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"tensor of shape {tuple(shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} object"


class Report:
    """What Tritium did to one model. `str(report)` is a page of text, `to_dict()` the same as data, `to_html` a page."""

    def __init__(
        self,
        records: Iterable[GraphRecord],
        limits: Iterable[compat.LimitReached] = (),
        *,
        components: Iterable[Component] = (),
        measurement: Measurement | None = None,
        violations: Iterable[Violation] = (),
    ) -> None:
        self.records = list(records)
        self.limits = list(limits)
        # The parts of a pipeline, where the report is about one.
        self.components = list(components)
        self.measurement = measurement
        # Calls outside of `Plan(shapes=...)`.
        self.violations = list(violations)

    @property
    def device(self) -> dict[str, Any]:
        types = {record.device_type for record in self.records}
        chosen = "cuda" if "cuda" in types else next(iter(types), None)
        return dict(device.describe(chosen).to_dict())

    @property
    def sites(self) -> dict[str, SiteCounts]:
        counts = {family: SiteCounts() for family in SEED_FAMILIES}
        for site in itertools.chain.from_iterable(record.sites for record in self.records):
            for family in site.families:
                of_family = counts.setdefault(family, SiteCounts())
                setattr(of_family, site.outcome, getattr(of_family, site.outcome) + 1)
                of_family.reasons[site.reason] += 1
        return counts

    @property
    def fallbacks(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for entry in itertools.chain.from_iterable(record.fallbacks for record in self.records):
            known = found.setdefault((entry["op"], entry["reason"]), {**entry, "count": 0, "arguments": Counter()})
            known["count"] += entry["count"]
            known["arguments"].update(entry.get("arguments", {}))
        return [{**entry, "arguments": dict(entry["arguments"])} for entry in found.values()]

    @property
    def attention(self) -> list[dict[str, Any]]:
        """Who computes which attention of the graphs, and the densities of sparse ones; see `tritium.layers`."""
        return LEDGER.attention_of(self.records)

    @property
    def lowered(self) -> list[dict[str, Any]]:
        """Operators of Inductor's graphs that became generated code, most frequent first."""
        total: Counter[str] = Counter()
        for entry in itertools.chain.from_iterable(record.lowered for record in self.records):
            total[entry["op"]] += entry["count"]
        return [{"op": op, "count": count} for op, count in total.most_common()]

    @property
    def not_fused(self) -> list[dict[str, Any]]:
        """Pairs of generated kernels of which one reads what the other writes or reads, with Inductor's reason."""
        return [{"graph": record.graph, **pair} for record in self.records for pair in record.not_fused]

    @property
    def recompiles(self) -> list[dict[str, str | None]]:
        found = [record.recompile for record in self.records if record.recompile is not None]
        for limit in self.limits:
            last = parse_guard_failure("", limit.reason, {})
            found.append(
                Recompile(
                    f"{limit.function} ({limit.file.rsplit('/', 1)[-1]}:{limit.line})",
                    last.argument,
                    last.was,
                    last.now,
                    f"{limit.limit} ({limit.value}) reached, runs eagerly from now on for other arguments; "
                    f"last: {last.reason}",
                )
            )
        return [entry.to_dict() for entry in found]

    @property
    def captures(self) -> list[dict[str, Any]]:
        return [{"graph": record.graph, **entry.to_dict()} for record in self.records for entry in record.captures]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return [{"graph": record.graph, **kernel} for record in self.records for kernel in record.kernels]

    @property
    def passes(self) -> list[dict[str, Any]]:
        return [{"graph": record.graph, **entry.to_dict()} for record in self.records for entry in record.passes]

    @property
    def folded(self) -> list[dict[str, Any]]:
        return [{"graph": record.graph, **entry.to_dict()} for record in self.records for entry in record.folded]

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [{"graph": record.graph, **entry.to_dict()} for record in self.records for entry in record.failures]

    def to_dict(self) -> dict[str, Any]:
        return {
            "versions": compat.versions(),
            "device": self.device,
            "components": [component.to_dict() for component in self.components],
            "measurement": self.measurement.to_dict() if self.measurement is not None else None,
            "graphs": [record.describe() for record in self.records],
            "sites": {family: counts.to_dict() for family, counts in self.sites.items()},
            "attention": self.attention,
            "lowered": self.lowered,
            "fallbacks": self.fallbacks,
            "not_fused": self.not_fused,
            "recompiles": self.recompiles,
            "violations": [violation.to_dict() for violation in self.violations],
            "captures": self.captures,
            "kernels": self.kernels,
            "passes": self.passes,
            "folded": self.folded,
            "failures": self.failures,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def dump(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write a folder for every generated kernel, in which it can be read, run, edited and measured alone.

        They are `<folder>/<function>-<graph>/fused_<operators>_<hash>`, with the files that `tritium.whitebox` lists. On a
        warm start they come from beside Inductor's cache; a graph whose kernels are not known raises a `ReportError`,
        after the others were written.
        """
        written = [path for record in self.records for path in record.write_kernels(Path(folder))]
        lacking = [f"{record.graph} ({reason})" for record in self.records if (reason := record.why_no_kernels())]
        if lacking:
            raise ReportError(
                f"no kernels are known for graph {'; '.join(lacking)}; {len(written)} folders were written"
            )
        return written

    def to_html(self, path: str | os.PathLike[str], *, title: str = "Tritium report") -> None:
        """Write one page that holds everything it shows: it loads nothing. The file appears whole or not at all."""
        from tritium import page

        sites = [
            {"graph": record.graph, **dataclasses.asdict(site)} for record in self.records for site in record.sites
        ]
        drawings = [
            {"graph": record.graph, "function": record.function, **record.drawing.to_dict()}
            for record in self.records
            if record.drawing is not None
        ]
        data = {**self.to_dict(), "bandwidth": self._bandwidth(), "site_list": sites, "drawings": drawings}
        page.write(path, page.render(data, title))

    def _bandwidth(self) -> float | None:
        if self.measurement is not None:
            return self.measurement.roofs.bytes_per_s
        return device.copy_bandwidth(device.Device(self.device["type"], self.device["name"]))

    def __str__(self) -> str:
        sections = [
            self._text_of_machine(),
            self.text_of_components(),
            self._text_of_graphs(),
            self._text_of_sites(),
            self._text_of_attention(),
            self._text_of_operators(),
            self._text_of_recompiles(),
            self._text_of_violations(),
            self._text_of_captures(),
            self._text_of_passes(),
            self._text_of_kernels(),
            self._text_of_pairs(),
            self._text_of_folded(),
            self._text_of_failures(),
        ]
        return "\n\n".join(section for section in sections if section)

    def __repr__(self) -> str:
        recognised = sum(counts.recognised for counts in self.sites.values())
        return f"<Report: {len(self.records)} graphs, {recognised} sites recognised, {len(self.recompiles)} recompiles>"

    def _text_of_machine(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in compat.versions().items() if version)
        return f"Tritium report: {versions}; {self.device['type']} {self.device['name']}"

    def text_of_components(self) -> str:
        rows = []
        for component in self.components:
            time = "-" if component.milliseconds is None else f"{component.milliseconds:.2f}"
            share = "-" if component.share is None else f"{component.share:.0%}"
            first = f"{component.first_call_seconds:.1f}" if component.first_call_seconds else "-"
            rows.append((component.name, component.calls, time, share, first, component.what))
        header = ("component", "calls", "ms a call", "share", "s compiling", "what was done")
        return _table("Components", header, rows) if rows else ""

    def _text_of_graphs(self) -> str:
        rows = []
        for record in self.records:
            end = record.break_reason or "returns"
            if record.needs_gradients:
                end += " [needs gradients: left to Inductor]"
            rows.append((record.graph, record.function, record.engine, record.nodes, f"{record.seconds:.2f}", end))
        return _table("Graphs", ("graph", "function", "engine", "nodes", "seconds", "ends because"), rows)

    def _text_of_sites(self) -> str:
        rows = []
        for family, counts in self.sites.items():
            reasons = "; ".join(f"{count}x {reason}" for reason, count in counts.reasons.most_common())
            rows.append((family, counts.fused, counts.inductor, counts.declined, reasons))
        return _table("Sites", ("family", "fused", "inductor", "declined", "why"), rows)

    def _text_of_attention(self) -> str:
        rows = [(entry["graph"], entry["by"], entry["what"]) for entry in self.attention]
        return _table("Attention", ("graph", "by", "what"), rows) if rows else ""

    def _text_of_operators(self) -> str:
        """What became of Inductor's operators: generated code, or a call with a reason."""
        lines = [f"Lowered {entry['count']}x {entry['op']}" for entry in self.lowered]
        for entry in self.fallbacks:
            first, *others = entry["arguments"] or [""]
            more = f" and {len(others)} other shapes" if others else ""
            lines.append(
                f"Fallback {entry['count']}x {entry['op'].partition('(')[0]}({first}){more}  # {entry['reason']}, "
                f"has_lowering={entry.get('has_lowering')}, has_decomposition={entry.get('has_decomposition')}"
            )
        title = "Operators (lowered: became generated code; fallback: Inductor calls them instead)"
        return "\n".join([title, *lines]) if lines else ""

    def _text_of_pairs(self) -> str:
        pairs = sorted(self.not_fused, key=lambda pair: -pair["count"] * (pair["bytes_passed"] + pair["bytes_shared"]))
        rows = [
            (
                pair["graph"],
                pair["first"],
                pair["second"],
                f"{pair['count']}x",
                _bytes(pair["bytes_passed"]),
                _bytes(pair["bytes_shared"]),
                pair["reason"],
            )
            for pair in pairs[:MOST_PAIRS]
        ]
        title = "Not fused (pairs of kernels: the second reads what the first writes, or both read the same)"
        if len(pairs) > MOST_PAIRS:
            title += f"; the {MOST_PAIRS} that move most of {len(pairs)}"
        header = ("graph", "first", "second", "times", "passes", "both read", "Inductor's reason")
        return _table(title, header, rows) if rows else ""

    def _text_of_recompiles(self) -> str:
        rows = [
            (
                entry["graph"],
                entry["argument"] or "-",
                entry["was"] or "-",
                entry["now"] or "-",
                str(entry["reason"]) + (f"; to prevent it: {entry['suggestion']}" if entry["suggestion"] else ""),
            )
            for entry in self.recompiles
        ]
        return _table("Recompiles", ("graph", "argument", "was", "now", "reason"), rows) if rows else ""

    def _text_of_violations(self) -> str:
        rows = [(entry.part, f"{entry.times}x {entry.done}", entry.what) for entry in self.violations]
        return _table("Calls outside of the promised shapes", ("part", "done", "what was new"), rows) if rows else ""

    def _text_of_captures(self) -> str:
        rows = [
            (
                entry["graph"] if entry["piece"] is None else f"{entry['graph']} piece {entry['piece']}",
                entry["hits"],
                _bytes(entry["bytes"]),
                "not captured" if entry["declined"] else "copied" if entry["copies"] else "lent",
                entry["bucket"] + (f": {entry['declined']}" if entry["declined"] else ""),
            )
            for entry in self.captures
        ]
        return _table("Captures", ("graph", "replays", "bytes", "results", "bucket"), rows) if rows else ""

    def _text_of_passes(self) -> str:
        rows = []
        for entry in self.passes:
            notes = [f"{request['settings']} because {request['because']}" for request in entry["requests"]]
            notes += [entry["summary"]] if entry["summary"] else []
            notes += [f"{count}x left alone: {reason}" for reason, count in entry["left_alone"].items()]
            if entry["declined"]:
                notes.append(f"declined: {entry['declined']}")
            if entry["failed"]:
                notes.append(f"FAILED: {entry['failed']}")
            changed = "yes" if entry["changed"] else "no"
            rows.append((entry["graph"], entry["name"], changed, f"{entry['seconds']:.3f}", "; ".join(notes) or "-"))
        return _table("Passes", ("graph", "pass", "changed", "seconds", "requests, declines"), rows) if rows else ""

    def _text_of_kernels(self) -> str:
        if not self.kernels:
            missing = [record.graph for record in self.records if record.engine == "inductor"]
            return f"Kernels: none recorded for graph {', '.join(missing)}" if missing else ""
        # Equal blocks make the same kernel again and again: one row each.
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for kernel in self.kernels:
            groups.setdefault((kernel["graph"], kernel["name"]), []).append(kernel)
        rows = []
        for place, same in groups.items():
            kernel = same[0]
            moved = _bytes(kernel["bytes_read"] + kernel["bytes_written"])
            taken = [entry["measured_us"] for entry in same if entry["measured_us"] is not None]
            us = f"{sum(taken) / len(taken):.1f}" if taken else "-"
            rows.append([*place, f"{len(same)}x", us, moved, _bytes(kernel["ideal_bytes"]), " ".join(kernel["ops"])])
        title = f"Kernels ({len(self.kernels)} launches; region = bytes the whole memory-bound region must move)"
        header = ["graph", "kernel", "times", "us each", "moves", "region", "operators"]
        if self.measurement is None:
            for row in [header, *rows]:
                del row[3]
        return _table(title, header, rows)

    def _text_of_folded(self) -> str:
        rows = [
            (
                entry["graph"],
                entry["value"],
                _bytes(entry["bytes"]),
                ", ".join(entry["sources"]),
                entry["declined"] or "-",
            )
            for entry in self.folded
        ]
        return _table("Folded", ("graph", "value", "bytes", "from", "declined"), rows) if rows else ""

    def _text_of_failures(self) -> str:
        lines = []
        for entry in self.failures:
            where = f" (graphs in {entry['graphs_at']})" if entry["graphs_at"] else ""
            lines.append(f"{entry['graph']} {entry['part']} turned off: {entry['reason']}{where}")
        return "\n".join(["Failures", *lines]) if lines else ""


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Left-aligned columns; the last one is free to be long."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [min(48, max(len(row[i]) for row in cells)) for i in range(len(header) - 1)]
    lines = [title]
    for row in cells:
        fixed = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True))
        lines.append(f"  {fixed}  {row[-1]}".rstrip())
    return "\n".join(lines)
