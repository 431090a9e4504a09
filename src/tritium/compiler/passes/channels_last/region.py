"""Find the convolutions to convert, and the operations between them that keep a memory format."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium import compat
from tritium.compiler.passes.channels_last.strides import is_contiguous
from tritium.graph import argument, mutated_arguments, same_size, storages, tensors_of, value_of
from tritium.ops.memory_format import FORMATS

# A single convolution would be converted in both directions, which cuDNN does itself.
FEWEST_CONVOLUTIONS = 2

ALONE = "no other convolution shares its layout"
GROUPED = "grouped: cuDNN is slower at these channels-last"
WRITTEN = "it reads or gives a tensor that is written to in place"
NO_TENSOR_CORES = "float32 without TF32 runs on no tensor cores, and those are what wants channels last"
NO_BATCH = "its input has no batch dim"
NO_SHAPES = "nothing is known about its shapes"


_NAMES = """
    add sub mul div true_divide truediv neg pow square sqrt rsqrt exp sigmoid tanh abs clamp clamp_min clamp_max minimum
    maximum where addcmul lerp silu relu relu6 gelu leaky_relu elu mish hardswish hardsigmoid softplus dropout
    to float half bfloat16 type_as detach clone contiguous
    pad interpolate cat concat concatenate group_norm layer_norm rms_norm normalize linear mean sum amax amin
    avg_pool2d avg_pool3d permute transpose swapaxes swapdims movedim moveaxis reshape view flatten unflatten squeeze
    unsqueeze expand repeat repeat_interleave stack chunk split split_with_sizes unbind getitem select narrow flip
    pixel_shuffle pixel_unshuffle
""".split()  # noqa: SIM905 - shorter than one name per line
JOINS = frozenset({torch.cat, torch.concat, torch.concatenate})

# Operations whose values do not depend on input strides and which can keep a memory format, as functions and as method
# names.
AGNOSTIC = frozenset(
    {
        *_NAMES,
        *(
            getattr(space, name)
            for space in (torch, F, compat.operators.NN, operator)
            for name in _NAMES
            if hasattr(space, name)
        ),
    }
)
DROPOUTS = frozenset({F.dropout, torch.dropout})
# Operations that read sizes but no memory.
QUERIES = frozenset({"size", "dim", "numel", "ndimension"})


class Model:
    """A graph before the pass: the values, arguments and memory of its nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.values = {node: value_of(node) for node in self.nodes}
        self.arguments = {node: (node.args, node.kwargs) for node in self.nodes}
        self._sources = {node: node.all_input_nodes for node in self.nodes}
        self._written = {storage for node in self.nodes for storage in storages(mutated_arguments(node))}

    def insert_copy(self, copy: fx.Node, original: fx.Node) -> None:
        """Let an inserted node stand for a value of the model."""
        self.values[copy] = self.values[original]
        self.arguments[copy], self._sources[copy] = (copy.args, copy.kwargs), [original]

    def memory(self, nodes: Iterable[fx.Node]) -> set[int]:
        return {compat.tensors.storage_id(part) for node in nodes for part in tensors_of(self.values.get(node))}

    def is_written(self, node: fx.Node) -> bool:
        return bool(self.memory([node]) & self._written)

    def is_view(self, node: fx.Node) -> bool:
        """Return True if a value of the model is a view of an input; False for inserted nodes."""
        return bool(self.memory([node]) & self.memory(self._sources.get(node, ())))

    def is_agnostic(self, node: fx.Node) -> bool:
        """Return True if the result of an operation does not depend on the strides of its inputs."""
        if node.op not in ("call_function", "call_method") or node.target not in AGNOSTIC:
            return False
        if mutated_arguments(node) or self.is_written(node):
            return False
        if node.target in DROPOUTS and argument(node, 2, "training", node.kwargs.get("train", True)) is not False:
            # Random numbers are assigned in memory order.
            return False
        # `x.view(dtype)` reinterprets bits.
        return not (node.target == "view" and any(isinstance(arg, torch.dtype) for arg in node.args))

    def keeps_format(self, node: fx.Node) -> bool:
        """Return True if an operation returns an image or video and does not depend on strides."""
        value = self.values.get(node)
        return isinstance(value, torch.Tensor) and value.dim() in FORMATS and self.is_agnostic(node)


def operands(convolution: fx.Node) -> tuple[Any, Any]:
    """Return the input and the weight of a convolution."""
    return argument(convolution, 0, "input"), argument(convolution, 1, "weight")


def choose(model: Model, convolutions: Sequence[fx.Node]) -> tuple[set[fx.Node], list[str]]:
    """Return the convolutions to convert, and a reason for each of the others."""
    declined = {node: _decline(model, node) for node in convolutions}
    regions = _regions(model, [node for node, reason in declined.items() if reason is None])
    chosen = {node for region in regions if len(region) >= FEWEST_CONVOLUTIONS for node in region}
    return chosen, [reason or ALONE for node, reason in declined.items() if node not in chosen]


def _decline(model: Model, node: fx.Node) -> str | None:
    """Return why a convolution is not converted, or None."""
    parts = [part for part in (*operands(node), node) if isinstance(part, fx.Node)]
    values: list[Any] = [model.values.get(part) for part in parts]
    if len(values) < 3 or not all(isinstance(value, torch.Tensor) for value in values):
        return NO_SHAPES
    x, weight, _ = values
    if x.dim() != weight.dim():
        return NO_BATCH
    if argument(node, 6, "groups", 1) != 1:
        return GROUPED
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{x.dtype} has no channels-last convolution"
    if x.device.type == "cuda" and x.dtype == torch.float32 and not compat.inductor.allows_tf32():
        return NO_TENSOR_CORES
    return WRITTEN if any(map(model.is_written, parts)) else None


def _regions(model: Model, convolutions: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return groups of convolutions connected, in any direction, by operations that keep a format."""
    seeds = set(convolutions)
    inside = seeds.union(filter(model.keeps_format, model.nodes))
    neighbours: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in inside:
        for source in operands(node)[:1] if node in seeds else node.all_input_nodes:
            if source in inside:
                neighbours[node].append(source)
                neighbours[source].append(node)
    regions: list[list[fx.Node]] = []
    seen: set[fx.Node] = set()
    for first in convolutions:
        region, stack = [], [first]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                region += [node] if node in seeds else []
                stack += neighbours[node]
        regions.append(region)
    return regions


def upstream(model: Model, chosen: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the operations whose results reach a chosen convolution as images or videos."""
    reached: set[fx.Node] = set()
    stack = [operands(node)[0] for node in chosen]
    while stack:
        node = stack.pop()
        if node not in reached and model.keeps_format(node):
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached


def entries(model: Model, chosen: set[fx.Node], reached: set[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the values to convert once for all of their readers on the way to a convolution, with these readers."""
    found = []
    for node in model.nodes:
        if node in reached or node in chosen or not is_contiguous(model.values[node]) or model.is_written(node):
            continue
        readers = [user for user in node.users if user in reached and _keeps_channels(model, user, node)]
        if readers:
            found.append((node, readers))
    return found


def _keeps_channels(model: Model, node: fx.Node, source: fx.Node) -> bool:
    """Return True if an operation turns an image or video into another one with as many channels."""
    value, result = model.values[source], model.values[node]
    if value.dim() not in FORMATS or value.dim() != result.dim() or node.target in JOINS:
        return False
    pixels = any(not same_size(size, 1) for size in value.shape[2:])
    return pixels and not same_size(value.shape[1], 1) and same_size(value.shape[1], result.shape[1])
