"""The state of one compilation, which goes through the stages of the pipeline."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from tritium import compat
from tritium.artifacts.digest import identity
from tritium.compiler.passes.freezing import FrozenPart
from tritium.config import CompilationConfig
from tritium.errors import RequestConflict, TritiumError, UnrequestedConfig, brief
from tritium.fusions import Fusion
from tritium.graph import copied, value_of, with_graph
from tritium.passes import ConfigRequest, Pass, PassContext
from tritium.report.graph_log import GraphLog, file_name
from tritium.report.kernel_dump import KernelSource
from tritium.report.records import Failure, GraphRecord, PassRecord, SharedPiece

if TYPE_CHECKING:
    from tritium.compiler.capture.stage import Piece

NEEDS_GRADIENTS = (
    "the graph needs gradients: call it under torch.inference_mode() or torch.no_grad(), or freeze its parameters"
)
CAPTURED_AS_IT_IS = "graphs='only' captures the graph as it is"

# Named graphs for the report of a failure.
Graphs = Sequence[tuple[str, fx.Graph]]


@dataclass
class Unit:
    """A graph to lower: the whole graph, a piece between boundary ops, or a repeated block."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    # The name of its lowering in reports of failures.
    part: str = "lowering"
    # None for the whole graph.
    piece: SharedPiece | None = None
    # False for a block: if it cannot be lowered, its graph is compiled whole.
    may_run_eagerly: bool = True

    @cached_property
    def graph(self) -> fx.Graph:
        """A copy made at the first access: Inductor changes the graph that it compiles."""
        return copied(self.gm.graph)

    @classmethod
    def of_piece(cls, gm: fx.GraphModule, part: str, piece: SharedPiece, *, may_run_eagerly: bool = True) -> Unit:
        inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        return cls(gm, inputs, part, piece, may_run_eagerly)


@dataclass
class Compilation:
    """The compilation of one graph."""

    # The graph from Dynamo, which reads it afterwards: no stage changes it.
    dynamo: fx.GraphModule
    example_inputs: list[Any]
    config: CompilationConfig
    record: GraphRecord
    passes: Sequence[Pass]
    fusions: Sequence[Fusion]
    # Inductor settings from torch.compile(mode=, options=).
    user_settings: Mapping[str, Any] = field(default_factory=dict)
    # Inductor settings that passes request, with the names of the passes.
    requests: dict[str, tuple[Any, str]] = field(default_factory=dict)
    frozen: FrozenPart | None = None
    # The parts of a graph that is cut at boundary ops, else empty.
    pieces: list[Piece] = field(default_factory=list)
    # Code for every unit, once lowered.
    programs: list[Callable[..., Any]] = field(default_factory=list)
    # Records of stages that concern more than one step.
    tiling: PassRecord = field(default_factory=lambda: PassRecord("tiling_policy"))
    capture: PassRecord = field(default_factory=lambda: PassRecord("capture"))

    def __post_init__(self) -> None:
        self.gm = with_graph(self.dynamo, copied(self.dynamo.graph))
        if self.is_eager:
            self.record.engine = "eager"
        self.log = GraphLog(Path(url) if (url := self.config.graph_log_url) else None, self.record.label)
        self.context = PassContext(
            self.config,
            self.record.device_type,
            read_only=self._reason_to_keep_the_graph(),
            example_inputs=self.example_inputs,
            sites=self.record.sites,
            fusions=self.fusions,
        )

    def _reason_to_keep_the_graph(self) -> str | None:
        if self.record.needs_gradients:
            return NEEDS_GRADIENTS
        return CAPTURED_AS_IT_IS if self.config.graphs == "only" else None

    @property
    def is_eager(self) -> bool:
        """True if no code is generated."""
        return self.config.engine == "eager" or self.config.graphs == "only"

    @property
    def units(self) -> list[Unit]:
        """The graphs to lower: the whole graph, or its pieces between boundary ops."""
        if not self.pieces:
            return [Unit(self.gm, self.example_inputs)]
        captured = [(piece.gm, piece.spec.piece or 0) for piece in self.pieces if piece.spec is not None]
        return [Unit.of_piece(gm, f"lowering of piece {number}", SharedPiece(number)) for gm, number in captured]

    @property
    def settings(self) -> dict[str, Any]:
        """The Inductor settings for lowering; the caller's override those of passes."""
        return {**{name: value for name, (value, _) in self.requests.items()}, **self.user_settings}

    def identity(self, graph: fx.Graph) -> bytes:
        return identity(graph, self.config, self.passes, self.fusions)

    def merge(self, owner: str, requests: Sequence[ConfigRequest]) -> list[str]:
        """Merge the settings that a pass requests; return why some are not applied."""
        settings = [setting for request in requests for setting in request.settings.items()]
        unknown = compat.inductor.unknown_settings([name for name, _ in settings])
        if unknown:
            raise ValueError(f"this torch has no Inductor setting {', '.join(unknown)}")
        declined = []
        for name, value in settings:
            if name in self.user_settings and self.user_settings[name] != value:
                declined.append(f"{name}={value!r} not applied: the caller asked for {self.user_settings[name]!r}")
                continue
            other, other_owner = self.requests.setdefault(name, (value, owner))
            if other != value:
                raise RequestConflict(
                    f"passes {other_owner!r} and {owner!r} request different values for {name}: {other!r} and {value!r}"
                )
        return declined

    def withdraw_rewrites(self) -> bool:
        """Forget what passes did, because the rewritten graph failed; return True if one did anything."""
        self.gm = with_graph(self.dynamo, copied(self.dynamo.graph))
        if self.frozen is not None:
            del self.example_inputs[-len(self.frozen.example_values) :]
            self.frozen = None
        self.record.sites = [site.declined("lowering failed, see failures") for site in self.record.sites]
        return any(entry.changed or entry.requests or entry.failed for entry in self.record.passes)

    @contextlib.contextmanager
    def recorded(self, name: str, part: str, graphs: Callable[[], Graphs]) -> Iterator[PassRecord]:
        """Record a stage and its time; report an error inside instead of raising it, unless it is the caller's."""
        entry = PassRecord(name)
        self.record.passes.append(entry)
        start = time.perf_counter()
        try:
            yield entry
        except Exception as error:
            if is_the_callers(error):
                raise
            entry.failed = brief(error)
            self.fail(part, error, graphs())
        finally:
            entry.seconds = time.perf_counter() - start

    def fail(self, part: str, error: Exception, graphs: Graphs, kernels: Sequence[KernelSource] = ()) -> None:
        """Report a part that turns itself off, with its graphs and kernels written to a folder."""
        folder = compat.inductor.cache_dir() / "tritium" / "failures" / file_name(self.record.label)
        where = self.log.failed(graphs, part, folder, kernels)
        self.record.failures.append(Failure(part, brief(error), where))
        warnings.warn(
            f"tritium: {part} failed and is turned off for graph {self.record.graph} of {self.record.function}: "
            f"{brief(error)}" + (f"; graphs{' and kernels' if kernels else ''} in {where}" if where else ""),
            RuntimeWarning,
            stacklevel=2,
        )


def is_the_callers(error: Exception) -> bool:
    """Return True if an error must reach the caller; others disable a part and are reported."""
    ours = isinstance(error, TritiumError) and not isinstance(error, UnrequestedConfig)
    return ours or compat.dynamo.passes_through(error)
