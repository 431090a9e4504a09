"""The stages of a compilation, in order.

1. `channels_last`         convert regions of convolutions; before `fuse`, whose choice of kernels depends on strides
2. `fuse`                  recognise every fusion's sites; rewrite those with an owned provider
3. `convolution_bias`      add biases of convolutions in the rewritten norms that follow them
4. plug-ins' passes        sorted by name, then those passed to the backend, in that order
5. freezing                freeze the parameter-only part (enable_freezing), or the values in it that a pass marked
6. reuse_blocks            cut at repeated blocks, so that each distinct piece is lowered once
7. lower                   Inductor compiles with the merged requests, and `tiling_policy` tiles its Triton kernels;
                           or engine `eager` runs the graph without code generation
8. capture                 capture each call as a static device graph and replay it (`graphs`)
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium import fusions as fusion_catalogue
from tritium.artifacts.digest import identity, settings_digest
from tritium.catalog import Entry, plugins, unique
from tritium.compiler.blocks import stage as blocks
from tritium.compiler.blocks.kept import Compiled
from tritium.compiler.blocks.stage import Reuse
from tritium.compiler.blocks.stitch import boxed
from tritium.compiler.capture import stage as capture
from tritium.compiler.capture.key import modes
from tritium.compiler.capture.split import Piece
from tritium.compiler.interface import check_interface
from tritium.compiler.lower import Attempt, Lowered, Lowering, lower
from tritium.compiler.passes import convolution_bias, freezing, fuse
from tritium.compiler.passes.channels_last import convert
from tritium.compiler.passes.freezing import FrozenPart
from tritium.config import CompilationConfig
from tritium.errors import RequestConflict, TritiumError, UnrequestedConfig
from tritium.fusions import Fusion
from tritium.graph import copied, fingerprint, value_of, with_graph
from tritium.passes import Applied, ConfigRequest, Decline, Outcome, Pass, PassContext
from tritium.report import Failure, GraphRecord, PassRecord, SharedPiece
from tritium.report.diagram import diagram
from tritium.report.graph_log import GraphLog, file_name
from tritium.report.kernel_dump import KernelSource
from tritium.tiling.policy import policy_of

NEEDS_GRADIENTS = (
    "the graph needs gradients: call it under torch.inference_mode() or torch.no_grad(), or freeze its parameters"
)

UNTOUCHED = "graphs='only' captures the graph as it is"


def passes_for(config: CompilationConfig, fusions: Sequence[Fusion], passes: Sequence[Pass]) -> list[Pass]:
    """Return every pass that a backend runs, in order."""
    own = [convert.PASS] if config.pass_config.enable_channels_last else []
    own += [fuse.make_pass([*fusion_catalogue.catalog().values(), *fusions]), convolution_bias.PASS]
    here = Path(__file__)
    entries = [*(Entry(entry, here, "tritium") for entry in own), *_installed_passes()]
    entries += [Entry(entry, entry.file() or here, "Backend(passes=...)") for entry in passes]
    return [entry.value for entry in unique(entries, "pass").values()]


@functools.cache
def _installed_passes() -> tuple[Entry[Pass], ...]:
    return tuple(plugins("tritium.passes", Pass))


@dataclass
class Compilation:
    """The compilation of one graph."""

    gm: fx.GraphModule
    example_inputs: list[Any]
    config: CompilationConfig
    record: GraphRecord
    passes: Sequence[Pass]
    fusions: Sequence[Fusion]
    # Inductor settings from torch.compile(mode=, options=).
    user_settings: Mapping[str, Any]
    requests: dict[str, tuple[Any, str]] = field(default_factory=dict)
    frozen: FrozenPart | None = None

    def __post_init__(self) -> None:
        # Work on a copy: Dynamo still reads its graph afterwards.
        self.dynamo = self.gm
        self.gm = with_graph(self.dynamo, copied(self.dynamo.graph))
        folder = Path(self.config.graph_log_url) if self.config.graph_log_url else None
        self.log = GraphLog(folder, self.record.label)
        self.context = PassContext(self.config, self.record.device_type, example_inputs=self.example_inputs)

    def run(self) -> Callable[..., Any]:
        if self.record.needs_gradients:
            return self._run_untouched()
        if self.config.graphs == "only":
            return self._capture_untouched()
        for entry in self.passes:
            self._run_pass(entry)
        self.record.sites = self.context.sites
        marked = freezing.marked(self.gm.graph)
        if self.config.enable_freezing:
            self._freeze(None)
        elif marked:
            self._freeze(marked)
        self._keep_diagram()
        if self.config.graphs == "off":
            compiled = self._engine()
        else:
            compiled = capture.captured(self.gm, self._engine, self._engines_of_pieces, self.config, self.record)
        return self.frozen.wrap(compiled) if self.frozen is not None else compiled

    def _engine(self) -> Callable[..., Any]:
        programs = self._in_blocks([self.gm])
        if programs is not None:
            return programs[0]
        return self.gm.forward if self.config.engine == "eager" else self._lower()

    def _capture_untouched(self) -> Callable[..., Any]:
        """Capture the graph from Dynamo without rewriting or code generation; only count the sites."""
        self.context.read_only = UNTOUCHED
        self._run_pass(next(entry for entry in self.passes if entry.name == fuse.NAME))
        self.record.sites = self.context.sites
        self.record.engine = "eager"
        return capture.captured(
            self.gm,
            lambda: self.gm.forward,
            lambda pieces: [piece.gm.forward for piece in pieces],
            self.config,
            self.record,
        )

    def _run_untouched(self) -> Callable[..., Any]:
        """Leave a graph that needs gradients to Inductor and autograd; only count the sites."""
        self.context.read_only = NEEDS_GRADIENTS
        self._run_pass(next(entry for entry in self.passes if entry.name == fuse.NAME))
        self.record.sites = self.context.sites
        if self.config.graphs != "off":
            self.record.passes.append(PassRecord(capture.NAME, declined=NEEDS_GRADIENTS))
        if self.config.engine == "eager" or self.config.graphs == "only":
            return self.gm.forward
        with compat.inductor.inductor_patched(self.user_settings):
            return compat.inductor.compile_fx(self.dynamo, self.example_inputs)

    # --- passes ---

    def _run_pass(self, entry: Pass) -> None:
        record = PassRecord(entry.name)
        self.record.passes.append(record)
        self.log.note(self.gm.graph, entry.name, "before")
        before = copied(self.gm.graph)
        settings = compat.inductor.inductor_settings()
        sites = len(self.context.sites)
        start = time.perf_counter()
        try:
            outcome = entry.run(self.gm.graph, self.context)
            self._check_settings(entry, settings)
            self.gm.graph.lint()
            check_interface(before, self.gm.graph)
            record.changed = fingerprint(self.gm.graph) != fingerprint(before)
            self._take(entry, outcome, record)
            for part, error in self.context.failed:
                self._fail(part, error, [("before", before)])
        except Exception as error:
            if is_the_callers(error):
                raise
            self._turn_off(entry, record, before, error, sites)
        finally:
            self.context.failed.clear()
            record.seconds = time.perf_counter() - start
        if record.changed:
            self.gm.recompile()
        self.log.note(self.gm.graph, entry.name, "after")

    def _check_settings(self, entry: Pass, before: dict[str, Any]) -> None:
        after = compat.inductor.inductor_settings()
        changed = [name for name in before if not _equal(before[name], after[name])]
        if changed:
            config = compat.inductor.inductor_config()
            for name in changed:
                _assign(config, name, before[name])
            raise UnrequestedConfig(
                f"pass {entry.name!r} assigned {', '.join(changed)}; it must return a ConfigRequest instead"
            )

    def _take(self, entry: Pass, outcome: Outcome, record: PassRecord) -> None:
        if isinstance(outcome, Decline):
            record.declined = outcome.reason
            return
        if isinstance(outcome, Applied):
            record.summary, record.left_alone = outcome.summary, dict(outcome.declined)
            return
        requests = [outcome] if isinstance(outcome, ConfigRequest) else list(outcome or ())
        for request in requests:
            record.requests.append({"settings": dict(request.settings), "because": request.because})
            unknown = compat.inductor.unknown_settings(list(request.settings))
            if unknown:
                raise ValueError(f"this torch has no Inductor setting {', '.join(unknown)}")
        for request in requests:
            for name, value in request.settings.items():
                self._merge(entry, name, value, record)

    def _merge(self, entry: Pass, name: str, value: Any, record: PassRecord) -> None:
        if name in self.user_settings and self.user_settings[name] != value:
            record.declined = f"{name}={value!r} not applied: the caller asked for {self.user_settings[name]!r}"
            return
        known = self.requests.get(name)
        if known is not None and known[0] != value:
            raise RequestConflict(
                f"passes {known[1]!r} and {entry.name!r} request different values for {name}: {known[0]!r} and {value!r}"
            )
        self.requests[name] = (value, entry.name)

    def _turn_off(self, entry: Pass, record: PassRecord, before: fx.Graph, error: Exception, sites: int) -> None:
        broken = self.gm.graph
        self.gm.graph = before
        record.changed = False
        record.requests.clear()
        record.failed = brief(error)
        del self.context.sites[sites:]
        self._fail(f"pass {entry.name!r}", error, [("before", before), ("broken", broken)])

    def _fail(
        self,
        part: str,
        error: Exception,
        graphs: Sequence[tuple[str, fx.Graph]],
        kernels: Sequence[KernelSource] = (),
    ) -> None:
        otherwise = compat.inductor.cache_dir() / "tritium" / "failures" / file_name(self.record.label)
        where = self.log.failed(graphs, part, otherwise, kernels)
        self.record.failures.append(Failure(part, brief(error), where))
        warnings.warn(
            f"tritium: {part} failed and is turned off for graph {self.record.graph} of {self.record.function}: "
            f"{brief(error)}" + (f"; graphs{' and kernels' if kernels else ''} in {where}" if where else ""),
            RuntimeWarning,
            stacklevel=2,
        )

    # --- freeze and lower ---

    def _freeze(self, only: Sequence[fx.Node] | None) -> None:
        before = copied(self.gm.graph)
        self.log.note(self.gm.graph, freezing.NAME, "before")
        record = PassRecord(freezing.NAME)
        self.record.passes.append(record)
        start = time.perf_counter()
        try:
            self.frozen, self.record.frozen = freezing.freeze(self.gm.graph, self.example_inputs, only)
        except Exception as error:  # noqa: BLE001 - freezing is optional: report the error and keep the graph
            self.gm.graph = before
            record.failed = brief(error)
            self._fail(freezing.NAME, error, [("before", before)])
        record.seconds = time.perf_counter() - start
        if self.frozen is not None:
            record.changed = True
            self.gm.recompile()
            self.example_inputs = [*self.example_inputs, *self.frozen.example_values]
        self.log.note(self.gm.graph, freezing.NAME, "after")

    def _keep_diagram(self) -> None:
        try:
            self.record.diagram = diagram(self.dynamo.graph, self.gm.graph)
        except Exception as error:  # noqa: BLE001 - a failed diagram must not stop a model from running
            self.record.failures.append(Failure("diagram", brief(error)))

    def _lower(self) -> Callable[..., Any]:
        originals = [("original", self.dynamo.graph)]
        compiled = self._first_lowered(self._attempts(self.gm, self.example_inputs, "lowering", originals))
        if compiled is None:
            compiled = self._first_lowered(self._attempts_untouched())
        if compiled is None:
            self.record.engine = "eager"
            return self.dynamo.forward
        return compiled.run

    def _first_lowered(self, attempts: Iterable[Attempt]) -> Lowered | None:
        """Return the result of the first attempt that succeeds, or None; report each that fails."""
        for attempt in attempts:
            try:
                return lower(attempt.lowering, self.record)
            except Exception as error:
                if is_the_callers(error):
                    raise
                attempt.error = error
                self._fail(attempt.failed_part, error, attempt.graphs, attempt.lowering.unfinished)
        return None

    def _attempts(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        part: str,
        originals: Sequence[tuple[str, fx.Graph]] = (),
        piece: SharedPiece | None = None,
    ) -> Iterator[Attempt]:
        """Yield the rewritten graph; after failed tiling analysis, one without it and our policy."""
        key = self._identity(gm.graph)
        rewritten = copied(gm.graph)
        graphs = [("rewritten", rewritten), *originals]
        tiled = Lowering(gm, example_inputs, self._settings, key, policy_of(self.config), piece)
        first = Attempt(part, tiled, graphs, is_tiled=True)
        yield first
        if first.failed_in_tiling:
            settings = {**self._settings, **compat.tiling.NO_TILING_ANALYSIS}
            again = with_graph(gm, copied(rewritten))
            yield Attempt(part, Lowering(again, example_inputs, settings, key, piece=piece), graphs)

    def _attempts_untouched(self) -> Iterator[Attempt]:
        """Yield an attempt with the original graph and no requests, unless nothing was changed or requested."""
        changed = any(entry.changed or entry.requests or entry.failed for entry in self.record.passes)
        key = self._identity(self.gm.graph)
        if self.frozen is not None:
            self.example_inputs = self.example_inputs[: -len(self.frozen.example_values)]
            self.frozen = None
        self.record.sites = [site.declined("lowering failed, see failures") for site in self.record.sites]
        if changed:
            untouched = with_graph(self.dynamo, copied(self.dynamo.graph))
            lowering = Lowering(untouched, self.example_inputs, dict(self.user_settings), key)
            yield Attempt("lowering of the untouched graph", lowering, [("original", self.dynamo.graph)])

    @property
    def _settings(self) -> dict[str, Any]:
        return {**{name: value for name, (value, _) in self.requests.items()}, **self.user_settings}

    def _identity(self, graph: fx.Graph) -> bytes:
        return identity(graph, self.config, self.passes, self.fusions)

    # --- pieces ---

    def _engines_of_pieces(self, pieces: Sequence[Piece]) -> list[Callable[..., Any]]:
        """Return callables for the pieces of a graph that is cut at boundary ops."""
        programs = self._in_blocks([piece.gm for piece in pieces])
        if programs is not None:
            return programs
        self.record.order = [
            piece.spec.piece for piece in pieces if piece.spec is not None and piece.spec.piece is not None
        ]
        return [self._engine_of_piece(piece) for piece in pieces]

    def _engine_of_piece(self, piece: Piece) -> Callable[..., Any]:
        if self.config.engine == "eager":
            return piece.gm.forward
        rewritten = copied(piece.gm.graph)
        assert piece.spec is not None
        part = f"lowering of piece {piece.spec.piece}"
        compiled = self._first_lowered(
            self._attempts(piece.gm, piece.example_inputs, part, piece=SharedPiece(piece.spec.piece or 0))
        )
        return compiled.run if compiled is not None else with_graph(piece.gm, rewritten).forward

    def _in_blocks(self, gms: Sequence[fx.GraphModule]) -> list[Callable[..., Any]] | None:
        """Return callables for graphs whose equal blocks share code, or None if they are compiled whole."""
        if not self.config.reuse_blocks:
            return None
        entry = PassRecord(blocks.NAME)
        self.record.passes.append(entry)
        if self._settings.get("triton.cudagraphs") or compat.inductor.uses_cuda_graphs():
            entry.declined = "Inductor's own graphs keep the addresses of weights, which equal blocks do not share"
            return None
        start = time.perf_counter()
        try:
            return self._reuse(entry).programs(gms)
        except Exception as error:
            if is_the_callers(error):
                raise
            self.record.forget_pieces()
            entry.failed = brief(error)
            self._fail(blocks.NAME, error, [("rewritten", gm.graph) for gm in gms[:1]])
            return None
        finally:
            entry.seconds = time.perf_counter() - start

    def _reuse(self, entry: PassRecord) -> Reuse:
        if self.config.engine == "eager":
            return Reuse(lambda gm, _: Compiled(boxed(gm.forward)), None, True, self.record, entry)
        return Reuse(self._compile_block, self._surroundings, False, self.record, entry)

    def _compile_block(self, gm: fx.GraphModule, piece: SharedPiece) -> Compiled:
        inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        compiled = self._first_lowered(self._attempts(gm, inputs, "lowering of a block", piece=piece))
        if compiled is None:
            raise RuntimeError("a block cannot be lowered, so the graph is compiled whole")
        return Compiled(compat.inductor.boxed(compiled.run), compiled.observation, compiled.source)

    def _surroundings(self, gm: fx.GraphModule) -> Hashable:
        """Return everything that decides a graph's code in addition to the graph."""
        settings = tuple(sorted((name, repr(value)) for name, value in self._settings.items()))
        return self._identity(gm.graph), settings, settings_digest(), modes(), compat.inductor.global_state()


def is_the_callers(error: Exception) -> bool:
    """Return True if an error must reach the caller; others disable a part and are reported."""
    ours = isinstance(error, TritiumError) and not isinstance(error, UnrequestedConfig)
    return ours or compat.dynamo.passes_through(error)


def brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _equal(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and bool(left == right))


def _assign(config: Any, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    setattr(config, last, value)


def needs_gradients(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    )
