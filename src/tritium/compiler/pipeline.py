"""What happens to a graph, in what order.

1. `channels_last`         lay out regions of convolutions; before `fuse`, whose kernels are chosen by layout
2. `fuse`                  recognise every fusion's sites; rewrite those an owned kernel takes over
3. `convolution_bias`      let rewritten norms add the biases of convolutions in front of them
4. `nd_tiling_workaround`  and other passes of this package: rewrite, request configuration
5. plug-ins' passes        in order of their names, then those given to the backend, in the order given
6. fold                    take out the parameter-only part (enable_freezing), or what a pass asked for of it
7. lower                   Inductor compiles, under the merged requests, and its Triton kernels are tiled (`tiling_policy`);
                           or engine `eager` runs the graph as it is
8. capture                 record each call as a static device graph and replay it (`graphs`)
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat, whitebox
from tritium import fusions as fusion_catalogue
from tritium.catalog import Entry, plugins, unique
from tritium.compiler import fuse, hand_on, lay_out
from tritium.compiler.capture import stage as capture
from tritium.compiler.capture.split import Piece
from tritium.compiler.draw import draw
from tritium.compiler.dump import GraphLog, file_name
from tritium.compiler.fold import Folding, fold_parameters, marked_for_folding
from tritium.compiler.identity import identity
from tritium.compiler.lower import Lowering, lower
from tritium.config import CompilationConfig
from tritium.errors import RequestConflict, TritiumError, UnrequestedConfig
from tritium.fusions import Fusion
from tritium.passes import Applied, ConfigRequest, Decline, Outcome, Pass, PassContext
from tritium.report import Failure, GraphRecord, PassRecord
from tritium.tiling import nd_tiling
from tritium.tiling.policy import policy_of

NEEDS_GRADIENTS = (
    "the graph needs gradients: call it under torch.inference_mode() or torch.no_grad(), or freeze its parameters"
)

UNTOUCHED = "graphs='only' captures the graph as it is"


def passes_for(config: CompilationConfig, fusions: Sequence[Fusion], passes: Sequence[Pass]) -> list[Pass]:
    """Every pass a backend runs, in order."""
    own = [lay_out.PASS] if config.pass_config.enable_channels_last else []
    own += [fuse.make_pass([*fusion_catalogue.catalog().values(), *fusions]), hand_on.PASS]
    if config.pass_config.enable_nd_tiling_workaround:
        own.append(nd_tiling.PASS)
    here = Path(__file__)
    entries = [*(Entry(entry, here, "tritium") for entry in own), *_installed_passes()]
    entries += [Entry(entry, entry.file() or here, "Backend(passes=...)") for entry in passes]
    return [entry.value for entry in unique(entries, "pass").values()]


@functools.cache
def _installed_passes() -> tuple[Entry[Pass], ...]:
    return tuple(plugins("tritium.passes", Pass))


@dataclass
class Compilation:
    """One graph on its way through the pipeline."""

    gm: fx.GraphModule
    example_inputs: list[Any]
    config: CompilationConfig
    record: GraphRecord
    passes: Sequence[Pass]
    fusions: Sequence[Fusion]
    # What the user asked of Inductor through torch.compile(mode=, options=).
    user_settings: Mapping[str, Any]
    requests: dict[str, tuple[Any, str]] = field(default_factory=dict)
    folding: Folding | None = None

    def __post_init__(self) -> None:
        # Dynamo still reads its own graph after we return: everything here happens to a copy.
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
        marked = marked_for_folding(self.gm.graph)
        if self.config.enable_freezing:
            self._fold(None)
        elif marked:
            self._fold(marked)
        self._draw()
        if self.config.graphs == "off":
            compiled = self._engine()
        else:
            compiled = capture.captured(self.gm, self._engine, self._engine_of_piece, self.config, self.record)
        return self.folding.wrap(compiled) if self.folding is not None else compiled

    def _engine(self) -> Callable[..., Any]:
        return self.gm.forward if self.config.engine == "eager" else self._lower()

    def _capture_untouched(self) -> Callable[..., Any]:
        """No rewriting and no code generation: what Dynamo saw, replayed; the sites are still counted."""
        self.context.read_only = UNTOUCHED
        self._run_pass(next(entry for entry in self.passes if entry.name == fuse.NAME))
        self.record.sites = self.context.sites
        self.record.engine = "eager"
        return capture.captured(
            self.gm, lambda: self.gm.forward, lambda piece: piece.gm.forward, self.config, self.record
        )

    def _run_untouched(self) -> Callable[..., Any]:
        """Gradients are Inductor's and autograd's business; the sites are still counted."""
        self.context.read_only = NEEDS_GRADIENTS
        self._run_pass(next(entry for entry in self.passes if entry.name == fuse.NAME))
        self.record.sites = self.context.sites
        if self.config.graphs != "off":
            self.record.passes.append(PassRecord(capture.NAME, declined=NEEDS_GRADIENTS))
        if self.config.engine == "eager" or self.config.graphs == "only":
            return self.gm.forward
        with compat.inductor_patched(self.user_settings):
            return compat.compile_fx(self.dynamo, self.example_inputs)

    # --- passes ---

    def _run_pass(self, entry: Pass) -> None:
        record = PassRecord(entry.name)
        self.record.passes.append(record)
        self.log.note(self.gm.graph, entry.name, "before")
        before = copied(self.gm.graph)
        settings = compat.inductor_settings()
        sites = len(self.context.sites)
        start = time.perf_counter()
        try:
            outcome = entry.run(self.gm.graph, self.context)
            self._check_settings(entry, settings)
            self.gm.graph.lint()
            record.changed = fingerprint(self.gm.graph) != fingerprint(before)
            self._take(entry, outcome, record)
        except Exception as error:
            if is_the_callers(error):
                raise
            self._turn_off(entry, record, before, error, sites)
        finally:
            record.seconds = time.perf_counter() - start
        if record.changed:
            self.gm.recompile()
        self.log.note(self.gm.graph, entry.name, "after")

    def _check_settings(self, entry: Pass, before: dict[str, Any]) -> None:
        after = compat.inductor_settings()
        changed = [name for name in before if not _equal(before[name], after[name])]
        if changed:
            config = compat.inductor_config()
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
            unknown = compat.unknown_settings(list(request.settings))
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
        kernels: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        otherwise = compat.cache_dir() / "tritium" / "failures" / file_name(self.record.label)
        where = self.log.failed(graphs, part, otherwise, kernels)
        self.record.failures.append(Failure(part, brief(error), where))
        warnings.warn(
            f"tritium: {part} failed and is turned off for graph {self.record.graph} of {self.record.function}: "
            f"{brief(error)}" + (f"; graphs{' and kernels' if kernels else ''} in {where}" if where else ""),
            RuntimeWarning,
            stacklevel=2,
        )

    # --- fold and lower ---

    def _fold(self, only: Sequence[fx.Node] | None) -> None:
        before = copied(self.gm.graph)
        self.log.note(self.gm.graph, "fold", "before")
        record = PassRecord("fold")
        self.record.passes.append(record)
        start = time.perf_counter()
        try:
            self.folding, self.record.folded = fold_parameters(self.gm.graph, self.example_inputs, only)
        except Exception as error:  # noqa: BLE001 - folding is an optimisation: reported, and the graph stays as it was
            self.gm.graph = before
            record.failed = brief(error)
            self._fail("fold", error, [("before", before)])
        record.seconds = time.perf_counter() - start
        if self.folding is not None:
            record.changed = True
            self.gm.recompile()
            self.example_inputs = [*self.example_inputs, *self.folding.example_values]
        self.log.note(self.gm.graph, "fold", "after")

    def _draw(self) -> None:
        try:
            self.record.drawing = draw(self.dynamo.graph, self.gm.graph)
        except Exception as error:  # noqa: BLE001 - a drawing for people is no reason for a model not to run
            self.record.failures.append(Failure("drawing", brief(error)))

    def _lower(self) -> Callable[..., Any]:
        settings = {**{name: value for name, (value, _) in self.requests.items()}, **self.user_settings}
        key = identity(self.gm.graph, self.config, self.passes, self.fusions)
        rewritten = copied(self.gm.graph)
        attempt = Lowering(self.gm, self.example_inputs, settings, key, policy_of(self.config))
        try:
            return lower(attempt, self.record)
        except Exception as error:
            if is_the_callers(error):
                raise
            if compat.came_from_tiling(error):
                self._fail("tiling analysis", error, [("rewritten", rewritten)], attempt.unfinished)
                return self._lower_untiled(rewritten, settings, key)
            graphs = [("rewritten", rewritten), ("original", self.dynamo.graph)]
            self._fail("lowering", error, graphs, attempt.unfinished)
        return self._lower_untouched(key)

    def _engine_of_piece(self, piece: Piece) -> Callable[..., Any]:
        """One piece of a graph that is cut at boundary ops; what is known of its kernels joins the others'."""
        if self.config.engine == "eager":
            return piece.gm.forward
        settings = {**{name: value for name, (value, _) in self.requests.items()}, **self.user_settings}
        key = identity(piece.gm.graph, self.config, self.passes, self.fusions)
        rewritten = copied(piece.gm.graph)
        attempt = Lowering(piece.gm, piece.example_inputs, settings, key, policy_of(self.config))
        seen = {name: getattr(self.record, name) for name in ("kernels", "fallbacks", "lowered", "not_fused")}
        sources = whitebox.unpack(self.record.sources) if self.record.sources else []
        try:
            compiled = lower(attempt, self.record)
        except Exception as error:
            if is_the_callers(error):
                raise
            self._fail(f"lowering of piece {piece.spec.piece}", error, [("rewritten", rewritten)], attempt.unfinished)
            return with_graph(piece.gm, rewritten).forward
        for name, before in seen.items():
            setattr(self.record, name, [*before, *getattr(self.record, name)])
        if self.record.sources and sources:
            self.record.sources = whitebox.pack([*sources, *whitebox.unpack(self.record.sources)])
        return compiled

    def _lower_untiled(self, rewritten: fx.Graph, settings: Mapping[str, Any], key: bytes) -> Callable[..., Any]:
        """Once more, with Inductor's tiling analysis and our policy off."""
        gm = with_graph(self.gm, copied(rewritten))
        attempt = Lowering(gm, self.example_inputs, {**settings, **compat.NO_TILING_ANALYSIS}, key)
        try:
            return lower(attempt, self.record)
        except Exception as error:
            if is_the_callers(error):
                raise
            graphs = [("rewritten", rewritten), ("original", self.dynamo.graph)]
            self._fail("lowering", error, graphs, attempt.unfinished)
        return self._lower_untouched(key)

    def _lower_untouched(self, key: bytes) -> Callable[..., Any]:
        changed = any(entry.changed or entry.requests or entry.failed for entry in self.record.passes)
        inputs = self.example_inputs
        if self.folding is not None:
            inputs = inputs[: -len(self.folding.example_values)]
            self.folding = None
        self.record.sites = [site.declined("lowering failed, see failures") for site in self.record.sites]
        if changed:
            attempt = Lowering(
                with_graph(self.dynamo, copied(self.dynamo.graph)), inputs, dict(self.user_settings), key
            )
            try:
                return lower(attempt, self.record)
            except Exception as error:
                if is_the_callers(error):
                    raise
                original = [("original", self.dynamo.graph)]
                self._fail("lowering of the untouched graph", error, original, attempt.unfinished)
        self.record.engine = "eager"
        return self.dynamo.forward


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy that keeps what Dynamo hangs on nodes outside their meta."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda source: nodes[source])
        if hasattr(node, "_dynamo_source"):
            nodes[node]._dynamo_source = node._dynamo_source
    return copy


def with_graph(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Dynamo's module around another graph, with what AOTAutograd looks for on it."""
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    return made


def fingerprint(graph: fx.Graph) -> int:
    """Equal for graphs that compute the same in the same order."""
    index = {node: position for position, node in enumerate(graph.nodes)}
    return hash(
        tuple(
            (node.op, str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda source: index[source])))
            for node in graph.nodes
        )
    )


def is_the_callers(error: Exception) -> bool:
    """Whether an error must reach the caller; every other one turns a part off, is reported, and is warned about."""
    ours = isinstance(error, TritiumError) and not isinstance(error, UnrequestedConfig)
    return ours or compat.passes_through(error)


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
