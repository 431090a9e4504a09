"""Compute selected linears in 8 bits, or from weights stored in 8 or 4 bits.

Before:  a = linear(x, wa, ba); b = linear(x, wb, bb)
After:   q, s = tritium::quantize_rows(x)                 once for all linears that read x
         a = tritium::scaled_linear(q, s, wa', sa, ba)    with wa', sa = frozen(quantize_weight(wa))
         b = tritium::scaled_linear(q, s, wb', sb, bb)

A technique selects the linears by name and runs this pass before `fuse`. `quantize_rows` is inlined: Inductor computes it in
the kernel that produces x. Weights are quantized again when they change, as `freezing` detects it. Linears whose module
stores quantized bytes call the same ops themselves; here they share one quantization of their input.

Static scales, also by step, are registered by weight: see `input_scales`. Linears that read one value use the scales of the
first of them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium import compat, ops, tuning
from tritium.compiler.passes import freezing
from tritium.compiler.passes import input_scales as static
from tritium.config import CompilationConfig
from tritium.graph import argument, mutated_arguments, storages, value_of
from tritium.ops import INDUCTOR, REFERENCE, Op, quantize_rows, scaled_linear, weight_only_linear
from tritium.ops.op import count
from tritium.ops.quantize_rows import FP8, INT8
from tritium.passes import Applied, Pass, PassContext

NAME = "quantize"

Format = Literal["fp8", "int8", "int8-weights", "int4-weights"]
Scales = Literal["row", "static", "step"]

# The dtype of activations and weights of the formats that multiply in 8 bits.
PRODUCTS = {"fp8": FP8, "int8": INT8}

# An input of fewer rows is about one row an image: its product only reads the weight, and errors in it move every token.
FEW_ROWS = 16

# The provider of ops whose code Inductor generates.
INLINED = "inlined"

# The provider of products that computes a GELU in its epilogue.
EPILOGUES = "triton"

# Linears that read one value of at most this many rows become one product, whose weights are joined: apart, they leave most
# multiprocessors of a GPU idle. Products of more rows lose: 4 + 8 blocks of FLUX at 1024 px took 18.91 ms instead of 18.75
# on an H200 with all of them joined.
JOIN_ROWS = {"cuda": 1024}

_AUTOCAST = "the graph casts automatically (autocast): the dtype of its products is not the model's"


@dataclass(frozen=True)
class Precision:
    """How one linear is computed.

    Args:
        format: The format of activations and weights, or of stored weights alone.
        rotate: The size of the groups of columns that are rotated before rounding; 0 for none.
        group: The number of columns that share a scale in `int4-weights`.
        few_rows: True if an input of few rows is quantized too, because the user named the layer.
        scales: "row" computes a scale for every row of the input. "static" uses the one, and "step" the one of the current
            step, that `input_scales.set_input_scales` set for the weight.
        steps: The number of scales of "step".
    """

    format: Format
    rotate: int = 0
    group: int = 64
    few_rows: bool = False
    scales: Scales = "row"
    steps: int = 1

    def __str__(self) -> str:
        named = {"row": "", "static": ", static scale", "step": f", static scales of {self.steps} steps"}
        return self.format + (f", rotated by {self.rotate}" if self.rotate else "") + named[self.scales]


@dataclass
class Outcome:
    """What became of one linear in compiled code: its provider, or the reason why it stayed as it was."""

    provider: str = ""
    declined: str = ""


# Linears by name, sorted, with their precision.
Linears = tuple[tuple[str, Precision], ...]

# The outcome of each linear in this process, by the linears that a pass selects. Equal passes share compiled code, so that
# a pass may find no graph to rewrite.
_OUTCOMES: dict[Linears, dict[str, Outcome]] = {}


@dataclass(frozen=True)
class QuantizeLinears:
    """The function of the pass: the names of linears without `.weight`, sorted, with their precision.

    Blocks that are compiled by themselves get the names below their path. Equal blocks with equal precisions then have
    equal passes and share code; others do not.
    """

    linears: Linears
    # By device type: the most rows of products that are joined.
    join_rows: tuple[tuple[str, int], ...] = ()

    def within(self, path: str) -> QuantizeLinears:
        below = f"{path}."
        linears = [(name.removeprefix(below), how) for name, how in self.linears if name.startswith(below)]
        return replace(self, linears=tuple(linears)) if path else self

    def __call__(self, graph: fx.Graph, context: PassContext) -> Applied:
        outcomes = _OUTCOMES.setdefault(self.linears, {})
        rewriter = _Rewriter(graph, context)
        precisions = dict(self.linears)
        for node, name in linears_of(graph):
            if name in precisions:
                outcomes[name] = rewriter.rewrite(node, precisions[name])
        rewriter.unpack_to_fp8()
        rewriter.share_quantization()
        rewriter.join_products(dict(self.join_rows).get(context.device_type, 0))
        rewriter.absorb_gelu()
        found = [outcome for name, outcome in outcomes.items() if name in precisions]
        done = sum(not outcome.declined for outcome in found)
        declined = Counter(outcome.declined for outcome in found if outcome.declined)
        return Applied(f"{done} linears quantized, {rewriter.shared} share an input's quantization", declined)


def quantize_linears(linears: Mapping[str, Precision]) -> Pass:
    """Return the pass for some linears, by name."""
    return Pass(NAME, QuantizeLinears(_sorted(linears), join_rows=tuple(JOIN_ROWS.items())), early=True)


def outcomes_of(linears: Mapping[str, Precision], blocks: Iterable[str] = ()) -> dict[str, Outcome]:
    """Return what became of linears in compiled code; with the paths of blocks, in code of single blocks."""
    found = dict(_OUTCOMES.get(_sorted(linears), {}))
    for path in blocks:
        below = QuantizeLinears(_sorted(linears)).within(path).linears
        found |= {f"{path}.{name}": outcome for name, outcome in _OUTCOMES.get(below, {}).items() if below}
    return found


def _sorted(linears: Mapping[str, Precision]) -> Linears:
    return tuple(sorted(linears.items(), key=lambda pair: pair[0]))


def linears_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Yield the linears of a graph whose weight is a parameter, each with the name of its module."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.linear:
            weight = _operands(node)[1]
            if weight.op == "placeholder" and compat.dynamo.is_parameter_placeholder(weight):
                yield node, linear_name(compat.dynamo.source_name(weight))


def linear_name(parameter: str) -> str:
    """Return the name of a linear in its model from Dynamo's name of its weight.

    >>> linear_name("self.blocks.0.attn.to_q.base_layer.weight")
    'blocks.0.attn.to_q'
    """
    path = parameter.split(".")[1:-1]
    # PEFT puts the linear into a module of its own.
    return ".".join(part for part in path if part != "base_layer")


def choose_product(op: Op, arguments: dict[str, Any], config: CompilationConfig, device_type: str) -> tuple[str, str]:
    """Return the provider of a quantized product and why; the provider is empty if none can compute it.

    A verdict decides where there is one, else the op's first provider that takes the arguments: an explicit request for
    quantization is honoured. On a CPU the reference computes a format that has no product there.
    """
    provider, why = tuning.choose(op, arguments, config, device_type)
    if provider != INDUCTOR:
        return provider, why
    declines = ops.declines(op, op.bind(**arguments))
    able = [name for name, reason in declines.items() if reason is None]
    if able:
        return able[0], "the first provider that takes it"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declines.items())
    if device_type == "cpu" and arguments["q"].dtype != torch.int8:
        return REFERENCE, f"computed from dequantized values ({reasons})"
    return "", reasons


class _Rewriter:
    def __init__(self, graph: fx.Graph, context: PassContext) -> None:
        self.graph, self.context = graph, context
        self.shared = self.joined = 0
        self._weights: dict[tuple[fx.Node, Precision], tuple[fx.Node, ...]] = {}
        self._step: fx.Node | None = None
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = dict(zip(inputs, context.example_inputs, strict=False))
        self._has_autocast = any(_casts(node, context.device_type) for node in graph.nodes)

    def rewrite(self, node: fx.Node, how: Precision) -> Outcome:
        """Replace a linear by quantized ops, or return why it stays."""
        if self._has_autocast:
            return Outcome(declined=_AUTOCAST)
        x, weight, bias = _operands(node)
        rows = count(value_of(x).shape[:-1])
        if how.format in PRODUCTS and rows <= FEW_ROWS and not how.few_rows:
            return Outcome(declined=f"its input has {rows} rows: about one an image")
        with self.graph.inserting_before(node):
            made, outcome = (self._product if how.format in PRODUCTS else self._from_bytes)(node, x, weight, bias, how)
        if made is not None:
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            self.graph.erase_node(node)
        return outcome

    def _product(
        self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, how: Precision
    ) -> tuple[fx.Node | None, Outcome]:
        dtype, config, device_type = PRODUCTS[how.format], self.context.config, self.context.device_type
        if how.rotate and value_of(x).shape[-1] % how.rotate:
            return None, Outcome(declined=f"its {value_of(x).shape[-1]} columns are no multiple of {how.rotate}")
        if how.scales != "row" and (reason := self._no_scales(weight, how)) is not None:
            return None, Outcome(declined=reason)
        rows: dict[str, Any] = {"x": value_of(x), "dtype": dtype, "rotate": how.rotate}
        with _fake(x):
            q, scale = quantize_rows.OP.fake(**rows)
            bytes_, weight_scale = quantize_rows.quantize_weight(value_of(weight), dtype, how.rotate)
        values = {"q": q, "scale": scale, "weight": bytes_, "weight_scale": weight_scale}
        given = {**values, "bias": _value(bias), "out_dtype": value_of(node).dtype}
        provider, why = choose_product(scaled_linear.OP, given, config, device_type)
        if not provider:
            return None, Outcome(declined=why)
        by = REFERENCE if config.engine == "eager" else INLINED
        given_rows = (x, dtype, how.rotate, *self._static(weight, how))
        quantized = self.graph.call_function(quantize_rows.OP.overload, given_rows, {"provider": by})
        quantized.meta = {**node.meta, "example_value": (q, scale)}
        q_node, scale_node = self._items(quantized, (q, scale))
        weights = self._frozen(weight, how, quantize_rows.quantize_weight, (dtype, how.rotate), (bytes_, weight_scale))
        arguments = (q_node, scale_node, *weights, bias, given["out_dtype"])
        made = self.graph.call_function(scaled_linear.OP.overload, arguments, {"provider": provider})
        return made, Outcome(provider=provider)

    def _no_scales(self, weight: fx.Node, how: Precision) -> str | None:
        """Return why the static scales of a linear's input cannot be used, or None; without real inputs, None."""
        given = self._inputs.get(weight)
        if not isinstance(given, torch.Tensor) or compat.tensors.fake_mode_of(given) is not None:
            return None
        known = static.scales_of(given)
        if known is None:
            return static.NONE
        if known.scales.numel() != how.steps or (known.step is None) != (how.scales == "static"):
            return f"scales of its input were set for {known.scales.numel()} steps, and {how.steps} are asked for"
        return None

    def _static(self, weight: fx.Node, how: Precision) -> tuple[fx.Node | None, fx.Node | None]:
        """Return nodes of the static scales of a linear's input and of the step, or None for each."""
        if how.scales == "row":
            return None, None
        scales = self._beside(weight, static.input_scales, (how.steps,))
        if how.scales == "static":
            return scales, None
        if self._step is None:
            self._step = self._beside(weight, static.input_step, ())
        return scales, self._step

    def _beside(self, weight: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
        """Return a node of what a function finds for a weight, computed when freezing computes."""
        with self.graph.inserting_after(self._last_input()):
            made = self.graph.call_function(function, (weight, *arguments))
        with _fake(weight):
            made.meta["example_value"] = function(value_of(weight), *arguments)
        freezing.mark(made)
        return made

    def _from_bytes(
        self, _node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, how: Precision
    ) -> tuple[fx.Node | None, Outcome]:
        quantize, options = weight_quantizer(how)
        if how.format == "int4-weights" and value_of(weight).shape[1] % how.group:
            return None, Outcome(declined=f"its {value_of(weight).shape[1]} columns are no multiple of {how.group}")
        with _fake(x):
            values = quantize(value_of(weight), *options)
        weights = self._frozen(weight, how, quantize, options, values)
        config, op = self.context.config, weight_only_linear.OP
        by = REFERENCE if config.engine == "eager" else INLINED
        made = self.graph.call_function(op.overload, (x, *weights, bias), {"provider": by})
        return made, Outcome(provider=by)

    def _frozen(
        self, weight: fx.Node, how: Precision, quantize: Callable[..., Any], options: tuple[Any, ...], values: Any
    ) -> tuple[fx.Node, ...]:
        """Return nodes of a weight's bytes and scales, computed when the weight changes."""
        key = (weight, replace(how, few_rows=False, scales="row", steps=1))
        if key not in self._weights:
            with self.graph.inserting_after(self._last_input()):
                made = self.graph.call_function(quantize, (weight, *options))
            made.meta["example_value"] = values
            with self.graph.inserting_after(made):
                self._weights[key] = self._items(made, values)
            for item in self._weights[key]:
                freezing.mark(item)
        return self._weights[key]

    def _last_input(self) -> fx.Node:
        *_, last = self.graph.find_nodes(op="placeholder")
        return last  # type: ignore[no-any-return]  # find_nodes has no types

    def _items(self, node: fx.Node, values: tuple[Any, ...]) -> tuple[fx.Node, ...]:
        items = []
        for index, value in enumerate(values):
            items.append(self.graph.call_function(operator.getitem, (node, index)))
            items[-1].meta = {**node.meta, "example_value": value}
        return tuple(items)

    def unpack_to_fp8(self) -> None:
        """Multiply 4-bit weights in float8 where the provider `fp8` is pinned: one kernel unpacks the weight.

        The rows are quantized once for all linears that read them, in the kernel that produces them.
        """
        op, config = weight_only_linear.OP, self.context.config
        if config.provider_for(op.name) != weight_only_linear.IN_FP8.name:
            return
        for node in list(self.graph.find_nodes(op="call_function", target=op.overload)):
            given = op.bind(*node.args)
            if value_of(given.weight).dtype != torch.uint8:
                continue
            with _fake(given.x), self.graph.inserting_before(node):
                rows = cast("tuple[Any, ...]", quantize_rows.OP.fake(value_of(given.x), FP8))
                weights = weight_only_linear.int4_as_fp8(value_of(given.weight), value_of(given.scale))
                values = (*rows, *weights, _value(given.bias), value_of(node).dtype)
                provider, _ = choose_product(
                    scaled_linear.OP, vars(scaled_linear.OP.bind(*values)), config, self.context.device_type
                )
                if not provider:
                    continue
                by = REFERENCE if config.engine == "eager" else INLINED
                quantized = self.graph.call_function(quantize_rows.OP.overload, (given.x, FP8), {"provider": by})
                unpacked = self.graph.call_function(weight_only_linear.int4_as_fp8, (given.weight, given.scale))
                sides: list[fx.Node] = []
                for made, value in ((quantized, rows), (unpacked, weights)):
                    made.meta = {**node.meta, "example_value": value}
                    sides += self._items(made, value)
                arguments = (*sides, given.bias, value_of(node).dtype)
                product = self.graph.call_function(scaled_linear.OP.overload, arguments, {"provider": provider})
                product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            self.graph.erase_node(node)

    def share_quantization(self) -> None:
        """Quantize a value once for all linears that read it, unless it is written to in between."""
        known: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            written = storages(mutated_arguments(node))
            if written:
                known = {key: first for key, first in known.items() if not storages([key[0]]) & written}
            if node.target is not quantize_rows.OP.overload:
                continue
            # The scales of the first linear serve all: they were measured for one value.
            given = vars(quantize_rows.OP.bind(*node.args))
            key = (given["x"], *((name, value) for name, value in given.items() if name not in ("x", "scale")))
            first = known.setdefault((*key, given["scale"] is None, *node.kwargs.values()), node)
            if first is node:
                continue
            items = {item.args[1]: item for item in first.users}
            for user in list(node.users):
                user.replace_all_uses_with(items[user.args[1]])
                self.graph.erase_node(user)
            self.graph.erase_node(node)
            self.shared += 1

    def absorb_gelu(self) -> None:
        """Compute a GELU in the epilogue of our own product, unless its result is quantized: that kernel computes it."""
        for node in list(self.graph.nodes):
            if node.target is not F.gelu or argument(node, 1, "approximate") != "tanh":
                continue
            product = node.args[0]
            is_ours = product.target is scaled_linear.OP.overload and product.kwargs["provider"] == EPILOGUES
            if (
                is_ours
                and len(product.users) == 1
                and any(user.target is not quantize_rows.OP.overload for user in node.users)
            ):
                product.args = (*product.args[:6], "gelu_tanh")
                node.replace_all_uses_with(product)
                self.graph.erase_node(node)

    def join_products(self, at_most: int) -> None:
        """Compute the products of one quantized value of few rows as one, whose columns are the results of each.

        Their weights are joined when they change. A result is then a slice of rows that are as wide as all results.
        """
        groups: dict[Any, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.target is scaled_linear.OP.overload:
                given = scaled_linear.OP.bind(*node.args)
                fixed = (given.out_dtype, given.activation, given.bias is None, *node.kwargs.values())
                groups.setdefault((given.q, given.scale, *fixed), []).append(node)
        for (q, *_), nodes in groups.items():
            if len(nodes) > 1 and count(value_of(q).shape[:-1]) <= at_most:
                self._join(nodes)

    def _join(self, nodes: list[fx.Node]) -> None:
        first, *_ = nodes
        given = [scaled_linear.OP.bind(*node.args) for node in nodes]
        sides = [[getattr(one, name) for one in given] for name in ("weight", "weight_scale", "bias")]
        joined = [None if side[0] is None else self._joined(side) for side in sides]
        sizes = [value_of(node).shape[-1] for node in nodes]
        arguments = (first.args[0], first.args[1], *joined, *first.args[5:])
        with self.graph.inserting_before(first):
            made = self.graph.call_function(scaled_linear.OP.overload, arguments, dict(first.kwargs))
            with _fake(first):
                whole = torch.cat([value_of(node) for node in nodes], dim=-1)
            made.meta = {**first.meta, "example_value": whole}
            pieces = self.graph.call_method("split_with_sizes", (made, sizes, -1))
            with _fake(first):
                pieces.meta = {**first.meta, "example_value": whole.split_with_sizes(sizes, -1)}
            items = self._items(pieces, pieces.meta["example_value"])
        for node, item in zip(nodes, items, strict=True):
            node.replace_all_uses_with(item)
            self.graph.erase_node(node)
        self.joined += 1

    def _joined(self, side: list[fx.Node]) -> fx.Node:
        """Return a node of joined weights, scales or biases: a frozen value."""
        with self.graph.inserting_after(max([*side, self._last_input()])):
            made = self.graph.call_function(torch.cat, (list(side), 0))
        with _fake(side[0]):
            made.meta["example_value"] = torch.cat([value_of(one) for one in side])
        freezing.mark(made)
        return made


def weight_quantizer(how: Precision) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that quantizes a weight, and its arguments after the weight."""
    if how.format in PRODUCTS:
        return quantize_rows.quantize_weight, (PRODUCTS[how.format], how.rotate)
    if how.format == "int4-weights":
        return weight_only_linear.pack_int4, (how.group,)
    return quantize_rows.quantize_weight, (torch.int8, 0)


def _casts(node: fx.Node, device_type: str) -> bool:
    """Return True if a node starts an automatic cast on a device; models also switch it off, around rotations."""
    if getattr(node.target, "__name__", "") != "_enter_autocast":
        return False
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("device_type") == device_type and given.get("enabled", True) is not False


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given["input"], given["weight"], given.get("bias")


def _value(node: fx.Node | None) -> Any:
    return None if node is None else value_of(node)


def _fake(node: fx.Node) -> Any:
    return compat.tensors.fake_mode_of(value_of(node))
