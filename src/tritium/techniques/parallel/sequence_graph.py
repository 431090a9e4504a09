"""Rewrite attention over split streams in Dynamo's graph: the pass of sequence parallelism.

Before:  mark(x, "split") -> linear -> scaled_dot_product_attention -> linear -> mark(., "join")
After:   narrow(x) -> linear -> all_to_all, scaled_dot_product_attention, all_to_all -> linear -> all_gather
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from tritium import compat
from tritium.errors import PipelineError, TritiumError, brief
from tritium.graph import call, value_of
from tritium.passes import Applied, ConfigRequest, Outcome, Pass, PassContext
from tritium.techniques.parallel import streams_attention
from tritium.techniques.parallel.exchange import Grid, join, split
from tritium.techniques.parallel.exchange_attention import Chooser
from tritium.techniques.parallel.sequence_marks import (
    CLOSE,
    JOIN,
    LOCAL,
    OPEN,
    OPERATOR,
    SPLIT,
    WHOLE,
    segments_of,
)
from tritium.techniques.parallel.streams import Operation, Tag, Tokens, agree
from tritium.techniques.parallel.streams_rules import assigned, name_of, tags_of


def pass_of(grid: Grid, choose: Chooser) -> Pass:
    """Return the pass that rewrites the graphs of one part."""

    def run(graph: fx.Graph, context: PassContext) -> Outcome:
        if not any(node.target is OPERATOR for node in graph.nodes):
            return None
        try:
            rewriting = _Rewriting(graph, grid, choose)
            rewriting.run()
        except TritiumError:
            raise
        except Exception as error:
            # Without the pass the graph would be wrong.
            raise PipelineError(f"the tokens cannot be split: {brief(error)}") from error
        requests = requests_for(context.device_type)
        return requests or Applied(rewriting.summary)

    return Pass("sequence", run, early=True)


def requests_for(device_type: str) -> list[ConfigRequest]:
    """Return what makes Inductor overlap collectives with products, where it does not by itself."""
    settings = compat.inductor.overlap_settings()
    if not settings or device_type not in ("cpu", "cuda"):
        return []
    return [ConfigRequest(settings, because="waits for exchanged tokens are moved below the products behind them")]


class _Rewriting:
    """The rewriting of one graph: tags by the identity of fake values, and nodes that are replaced at the end."""

    def __init__(self, graph: fx.Graph, grid: Grid, choose: Chooser) -> None:
        self._graph, self._grid, self._choose = graph, grid, choose
        self._tags: dict[int, Tag] = {}
        # The tags of tensors that went into modules without rules.
        self._open: list[Tag] = []
        self._replaced: dict[fx.Node, fx.Node] = {}
        # Masks over the tokens of all ranks: nodes that were traced with local sizes, and those that have all.
        self._masks: dict[fx.Node, fx.Node] = {}
        self.rewritten = 0

    @property
    def summary(self) -> str:
        return f"{self.rewritten} attentions over tokens of {self._grid.size} ranks"

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is OPERATOR:
                self._mark(node)
            elif node.op in ("call_function", "call_method"):
                self._operation(node)
        if self._open:
            raise PipelineError("the tokens cannot be split: a graph breaks in a module without rules; run it eagerly")
        for node, other in self._replaced.items():
            node.replace_all_uses_with(other)
            self._graph.erase_node(node)
        for node in reversed(self._masks):
            if node.users:
                raise PipelineError(f"the tokens cannot be split: {next(iter(node.users))} reads a mask of all tokens")
            self._graph.erase_node(node)

    def _tag_of(self, value: Any) -> Tag:
        return self._tags.get(id(value))

    # --- marks ---

    def _mark(self, node: fx.Node) -> None:
        kind: Any
        dim: Any
        source, kind, dim, lengths, is_split, _ = node.args
        assert isinstance(source, fx.Node)
        value, result = value_of(source), value_of(node)
        # Tracing the mark has guarded on its lengths.
        known = [int(value_of(length)) if isinstance(length, fx.Node) else length for length in lengths]  # type: ignore[union-attr]
        tag = Tokens(dim, segments_of(known, is_split))  # type: ignore[arg-type]
        has = self._tag_of(value)
        if kind == WHOLE:
            self._masks[node] = self._source(source)
        elif kind == OPEN:
            self._open.append(has)
            self._replaced[node] = self._source(source)
        elif kind == CLOSE:
            self._tags[id(result)] = self._open.pop()
            self._replaced[node] = self._source(source)
        elif kind == LOCAL:
            is_declared = has is None and source.op == "placeholder"
            self._tags[id(result)] = tag if is_declared else _split_tag(has, tag)
            self._replaced[node] = self._source(source)
        elif kind == SPLIT:
            assert has is None
            self._tags[id(result)] = tag
            self._replaced[node] = self._record(
                node,
                lambda x: split(x, dim, tag.segments, self._grid).contiguous(),
                [source],
                with_stack=source.op == "placeholder",
            )
        else:
            assert kind == JOIN
            _split_tag(has, tag)
            if not node.users:
                self._replaced[node] = self._source(source)
                return
            self._replaced[node] = self._record(
                node, lambda x: join(x, dim, tag.segments, self._grid).contiguous(), [source], with_stack=False
            )

    def _source(self, node: fx.Node) -> fx.Node:
        return self._replaced.get(node, node)

    # --- operators ---

    def _operation(self, node: fx.Node) -> None:
        name = name_of(node.target)
        if name not in streams_attention.NAMES and any(source in self._masks for source in node.all_input_nodes):
            self._mask(node)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        result = _value(node)
        if self._open:
            return
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return
        if node.target is getattr:
            name = str(args[1])
        operation = Operation(name, tuple(args), kwargs, result, self._tag_of, self._grid)
        if name == "setitem":
            self._tags[id(args[0])] = assigned(operation)
        elif name in streams_attention.NAMES and streams_attention.is_split(operation):
            self._attention(node, operation)
        elif any(map(self._tag_of, operation.tensors)) or name.startswith(("zeros", "ones", "full", "empty", "new_")):
            self._tag(result, tags_of(operation))

    def _mask(self, node: fx.Node) -> None:
        """Repeat a node with masks over all tokens."""
        if any(isinstance(tag, Tokens) for tag in map(self._tag_of, map(_value, node.all_input_nodes))):
            raise PipelineError(f"the tokens cannot be split: {node} reads a mask of all tokens, and tokens of a rank")
        with self._graph.inserting_before(node):
            repeated = self._graph.node_copy(node, lambda source: self._masks.get(source, self._source(source)))
        repeated.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
        _value(repeated)
        self._masks[node] = repeated

    def _tag(self, result: Any, tags: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._tags[id(result)] = tags
        elif isinstance(result, (tuple, list)):
            tags = tags if isinstance(tags, list) else [tags] * len(result)
            for value, tag in zip(result, tags, strict=True):
                self._tag(value, tag)

    def _attention(self, node: fx.Node, operation: Operation) -> None:
        target = node.target
        assert callable(target)
        wholes = {id(_value(mask)): _value(whole) for mask, whole in self._masks.items()}
        args, kwargs = compat.tensors.map_tensors(
            lambda x: wholes.get(id(x), x), (operation.args, dict(operation.kwargs))
        )
        operation = replace(operation, args=args, kwargs=kwargs)
        attention = streams_attention.attention_of(target, operation)
        tensors = [x for x in (attention.q, attention.k, attention.v, attention.mask) if x is not None]
        sources = [self._masks.get(source, source) for source in node.all_input_nodes]
        nodes = {id(_value(source)): source for source in sources}
        provider = self._choose(attention.q)
        recorded = self._record(
            node,
            lambda *_: streams_attention.exchanged(operation, attention, self._grid, provider),
            [nodes[id(x)] for x in tensors],
        )
        self._tags[id(value_of(node))] = streams_attention.tag_of_result(operation, attention)
        self._replaced[node] = recorded
        self.rewritten += 1

    def _record(
        self, node: fx.Node, function: Callable[..., torch.Tensor], sources: list[fx.Node], *, with_stack: bool = True
    ) -> fx.Node:
        """Insert what a function calls on the values of some nodes, before a node."""
        values = [_value(source) for source in sources]
        nodes = {id(value): self._source(source) for value, source in zip(values, sources, strict=True)}
        meta: dict[str, Any] = {
            key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if with_stack and key in node.meta
        }
        recorder = _Recorder(self._graph, nodes, meta)
        mode = compat.tensors.fake_mode_of(values)
        with self._graph.inserting_before(node), mode, torch.no_grad(), recorder:
            result = function(*values)
        return recorder.node_of(result)


def _split_tag(tag: Tag, declared: Tokens) -> Tokens:
    if not agree(tag, declared):
        raise PipelineError(
            f"the tokens cannot be split: a block has tokens {_words(declared)}, and gets {_words(tag)}; if its graph "
            "breaks, run the part eagerly"
        )
    return declared


def _words(tag: Tag) -> str:
    if not isinstance(tag, Tokens):
        return "none that are split"
    parts = " and ".join(f"{segment.length}{'' if segment.is_split else ' on every rank'}" for segment in tag.segments)
    return f"{parts} in dim {tag.dim}"


def _value(node: fx.Node) -> Any:
    if "example_value" not in node.meta and node.op in ("call_function", "call_method"):
        args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
        mode = compat.tensors.fake_mode_of((args, kwargs))
        if mode is not None:
            with mode, torch.no_grad():
                node.meta["example_value"] = call(node, *args, **kwargs)
    return value_of(node)


class _Recorder(TorchFunctionMode):
    """Add every function that is called to a graph."""

    def __init__(self, graph: fx.Graph, nodes: dict[int, fx.Node], meta: dict[str, Any]) -> None:
        super().__init__()
        self._graph, self._nodes, self._meta = graph, nodes, meta
        # Keep values alive: their identities are keys.
        self._values: list[Any] = []

    def node_of(self, value: Any) -> fx.Node:
        return self._nodes[id(value)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) or (
            isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor)
        ):
            target = _target(func)
            given = self._mapped((args, kwargs or {}))
            create = self._graph.call_method if isinstance(target, str) else self._graph.call_function
            self._note(create(target, *given), result)
        return result

    def _note(self, node: fx.Node, value: Any) -> None:
        node.meta.update(self._meta, example_value=value)
        self._values.append(value)
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
            return
        for place, part in enumerate(value):
            if isinstance(part, torch.Tensor):
                self._note(self._graph.call_function(operator.getitem, (node, place)), part)

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._nodes[id(value)]
        if isinstance(value, dict):
            return {key: self._mapped(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._mapped, value))
        return value


def _target(func: Any) -> Any:
    """Return a function as Dynamo writes it into graphs, or the name of a method."""
    name = getattr(func, "__name__", "")
    if getattr(torch.Tensor, name, None) is not func:
        return func
    return getattr(operator, name.strip("_"), name) if name.startswith("__") else name
