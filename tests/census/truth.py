"""How many fusion sites a model has, counted without Tritium's matcher.

Two independent sources, one set of tags (`census.tags`):

- `truth`, eager: every torch call of one forward pass is recorded with the diffusers statement that made it. Whole
  operators (norms, GELU, SDPA) count by themselves, hand-written ones through tagged statements. A site is live when
  the output depends on its result, as autograd sees it: the step that made it is behind the output.
- `captured`: the same classification of the nodes of the graphs that Dynamo hands to a backend, by the source line that
  each node carries, with liveness by reachability. It differs from the eager count where equal blocks share a frame, or
  where code runs outside any graph.

Both mean dependence by structure. The text queries of the last joint block (Qwen-Image, SD3, Mochi) are live, because
they are part of the tensor that attention reads, though their rows of its result are cut off: no output shows them.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from census.graph import Capture, graph_calls
from census.record import Call, Recorder
from census.statements import Statement
from census.tags import family_of
from support.zoo.model import ZooModel

FAMILIES = (
    "rms_norm",
    "rope",
    "adalayernorm",
    "gelu",
    "mul_add",
    "group_norm_silu",
    "linear_gelu",
    "cat_linear",
    "layer_norm",
    "attention",
)
# `gelu` is the sum of these.
GELU_PARTS = ("plain_gelu", "geglu", "swiglu")
# `linear(cat([sin, cos]))` and the like in embeddings of time and size: kept out of `cat_linear`. In half precision a
# cast often stands between the two, which are then no pair.
EMBEDDING = "cat_linear_embedding"

OPERATORS = {"rms_norm": "rms_norm", "layer_norm": "layer_norm", "scaled_dot_product_attention": "attention"}
PAIRS = {("silu", "group_norm"): "group_norm_silu", ("gelu", "linear"): "linear_gelu", ("linear", "cat"): "cat_linear"}

Counts = dict[str, int]


@dataclass(frozen=True)
class Site:
    """One site: its family, the statement that makes it, and whether the output depends on it."""

    family: str
    statement: Statement
    live: bool


@dataclass(frozen=True)
class Truth:
    """The sites of a model: `eager` counts all that were executed, `live` those that the output depends on."""

    sites: tuple[Site, ...]

    @property
    def eager(self) -> Counts:
        return count(self.sites)

    @property
    def live(self) -> Counts:
        return count(site for site in self.sites if site.live)


def truth(model: ZooModel, dtype: torch.dtype = torch.float32) -> Truth:
    """Count the sites of one eager forward pass; a second call returns the first one's."""
    if (model.name, dtype) not in _TRUTHS:
        _TRUTHS[model.name, dtype] = _truth(model, dtype)
    return _TRUTHS[model.name, dtype]


_TRUTHS: dict[tuple[str, torch.dtype], Truth] = {}


def _truth(model: ZooModel, dtype: torch.dtype) -> Truth:
    calls, output = record(model, dtype)
    found = [(family, call) for call in calls for family in families(call)]
    loose = {call.statement for _, call in found if call.result.grad_fn is None}
    if loose:
        raise AssertionError(f"{model.name}: no gradient passes through {loose}, so liveness cannot be told")
    needed = _ancestors(output)
    return Truth(tuple(Site(family, call.statement, call.result.grad_fn in needed) for family, call in found))


def captured(model: ZooModel, dtype: torch.dtype = torch.float32, **how: bool) -> Counts:
    """Count the live sites of the graphs that `capture` returns."""
    return count_graphs(capture(model, dtype, **how))


def capture(
    model: ZooModel,
    dtype: torch.dtype = torch.float32,
    *,
    mark: bool = False,
    resize: bool = False,
    repeated_blocks: bool = False,
) -> list[GraphModule]:
    """Return the graphs that Dynamo makes of a model, or of its repeated blocks alone; no code is generated.

    Shapes become dynamic where `mark` marks them beforehand, or where `resize` calls the model again with its second
    size; the graphs are then those of the second call.
    """
    torch._dynamo.reset()
    backend = Capture()
    module = model.build(dtype)
    compile_ = module.compile_repeated_blocks if repeated_blocks else module.compile
    compile_(backend=backend)
    inputs = model.inputs(dtype)
    if mark:
        model.mark_dynamic(inputs)
    with torch.no_grad():
        module(**inputs)
        if resize:
            backend.graphs.clear()
            module(**model.inputs(dtype, size=model.sizes[1]))
    return backend.graphs


def count_graphs(graphs: Iterable[GraphModule]) -> Counts:
    """Count the live sites of captured graphs."""
    calls = [(call, live) for graph in graphs for call, live in graph_calls(graph)]
    return count(Site(family, call.statement, live) for call, live in calls if live for family in families(call))


def record(model: ZooModel, dtype: torch.dtype) -> tuple[list[Call], object]:
    """Run a model once in eager, with gradients, and return its calls and its output."""
    module = model.build(dtype)
    inputs = model.inputs(dtype)
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaf.requires_grad_()
    with _gradients_everywhere(), Recorder() as recorder:
        output = module(**inputs)
    return recorder.calls, output


def families(call: Call) -> Iterator[str]:
    """Yield the families that one operation is a site of."""
    if call.op in OPERATORS:
        yield OPERATORS[call.op]
    # The GELU of a GEGLU is counted by its product.
    if call.op == "gelu" and call.statement.scope != "GEGLU.gelu":
        yield "plain_gelu"
    tagged = family_of(call.op, call.statement)
    if tagged is not None:
        yield tagged
    if call.producer is not None:
        pair = PAIRS.get((call.op, call.producer.op))
        if pair == "cat_linear" and _is_embedding(call.producer.statement):
            pair = EMBEDDING
        if pair is not None:
            yield pair


def count(sites: Iterable[Site]) -> Counts:
    """Count sites by family; families without a site are there too."""
    counter = Counter(site.family for site in sites)
    counter["gelu"] = sum(counter[part] for part in GELU_PARTS)
    return {family: counter[family] for family in (*FAMILIES, *GELU_PARTS, EMBEDDING)}


def _is_embedding(statement: Statement) -> bool:
    return "cos(" in statement.text or re.search(r"(?i)embed", statement.scope) is not None


def _ancestors(output: object) -> set[torch.autograd.graph.Node]:
    """Return every step of autograd's graph behind an output."""
    pending = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    found: set[torch.autograd.graph.Node] = set()
    while pending:
        step = pending.pop()
        if step is not None and step not in found:
            found.add(step)
            pending.extend(source for source, _ in step.next_functions)
    return found


@contextlib.contextmanager
def _gradients_everywhere() -> Iterator[None]:
    """Let gradients pass the parts that a model runs under `torch.no_grad` (HiDream's experts)."""

    def enter(self: torch.no_grad) -> None:
        self.prev = torch.is_grad_enabled()

    with mock.patch.object(torch.no_grad, "__enter__", enter), torch.enable_grad():
        yield
