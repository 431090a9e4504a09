"""Run linears whose weights arrive quantized through the same ops as those that Tritium quantizes.

Before:  linear(x, w, b)                       w is torchao's Float8Tensor or Int8Tensor, with a scale for each row
         _scaled_mm(quantized(x), w.T, s, ws)  diffusers' linear of BFL's fp8r: a scale for each row of x, then the product
After:   q, s = tritium::quantize_rows(x)      once for all linears that read x
         tritium::scaled_linear(q, s, w.qdata, w.scale, b)
         tritium::weight_only_linear(x, w.qdata, w.scale, b)    int8 weights alone

The rows of inputs get scales that are powers of two, so results differ from torchao's and diffusers' by the rounding of their
inputs: only fidelity 'fast' allows it.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium import compat
from tritium.compiler.passes.quantize import INLINED, QuantizeLinears, choose_product
from tritium.graph import value_of
from tritium.ops import REFERENCE, quantize_rows, scaled_linear, weight_only_linear
from tritium.ops.quantize_rows import FP8, INT8
from tritium.passes import Applied, Pass, PassContext

NAME = "quantized_weights"

# torchao's classes of weights, and the dtype of their values.
_CLASSES = {"Float8Tensor": FP8, "Int8Tensor": INT8}

NOT_FAST = "its inputs would be rounded with other scales, and only fidelity='fast' allows it"


def quantized_weights(graph: fx.Graph, context: PassContext) -> Applied | None:
    """Rewrite every linear with a weight that arrived quantized; count the others by reason."""
    sites = [(node, take) for node in graph.nodes if (take := _taker_of(node)) is not None]
    if not sites:
        return None
    declined: Counter[str] = Counter()
    for node, take in sites:
        reason = NOT_FAST if context.config.fidelity != "fast" else take(_Rewrite(graph, context), node)
        if reason is not None:
            declined[reason] += 1
    # No linear is selected: the pass only joins equal quantizations.
    QuantizeLinears(())(graph, context)
    return Applied(f"{len(sites) - declined.total()} linears with quantized weights rewritten", declined)


def _taker_of(node: fx.Node) -> Any:
    """Return the function that rewrites a node, or None for all other nodes."""
    if node.op != "call_function":
        return None
    if node.target is F.linear:
        weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        value = value_of(weight) if isinstance(weight, fx.Node) else None
        return _take_torchao if type(value).__name__ in _CLASSES and hasattr(value, "qdata") else None
    return _take_fp8r if node.target is compat.operators.SCALED_PRODUCT and _fp8r_input(node) is not None else None


class _Rewrite:
    """What the rewrites share: nodes with values, and the provider of a product."""

    def __init__(self, graph: fx.Graph, context: PassContext) -> None:
        self.graph, self.config, self.device_type = graph, context.config, context.device_type
        # The mode of the graph's values; torchao's classes have none of their own.
        values = (value_of(node) for node in graph.nodes)
        modes = (compat.tensors.fake_mode_of(value) for value in values if isinstance(value, torch.Tensor))
        self.mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())
        self.by = REFERENCE if context.config.engine == "eager" else INLINED

    def node(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a node that calls a function, or a method by name, with its value."""
        create = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        made = create(function, args, kwargs)
        given = fx.map_arg(args, value_of)
        called = (lambda x, *rest: getattr(x, function)(*rest)) if isinstance(function, str) else function
        with self.mode:
            made.meta["example_value"] = called(*given, **kwargs)
        return made

    def product(
        self, x: fx.Node, weight: fx.Node, weight_scale: fx.Node, bias: Any, out_dtype: torch.dtype
    ) -> fx.Node | str:
        """Return a node of the quantized product, or the reason why there is none."""
        dtype = value_of(weight).dtype
        with self.mode:
            q, scale = quantize_rows.OP.fake(x=value_of(x), dtype=dtype, rotate=0)
        sides = {"q": q, "scale": scale, "weight": value_of(weight), "weight_scale": value_of(weight_scale)}
        given = {**sides, "bias": None if bias is None else value_of(bias), "out_dtype": out_dtype}
        provider, why = choose_product(scaled_linear.OP, given, self.config, self.device_type)
        if not provider:
            return why
        rows = self.graph.call_function(quantize_rows.OP.overload, (x, dtype, 0), {"provider": self.by})
        rows.meta["example_value"] = q, scale
        parts = [self.graph.call_function(operator.getitem, (rows, index)) for index in (0, 1)]
        for part, value in zip(parts, (q, scale), strict=True):
            part.meta["example_value"] = value
        arguments = (*parts, weight, weight_scale, bias, out_dtype)
        made = self.graph.call_function(scaled_linear.OP.overload, arguments, {"provider": provider})
        shape = (*value_of(x).shape[:-1], value_of(weight).shape[0])
        with self.mode:
            made.meta["example_value"] = value_of(x).new_empty(shape, dtype=out_dtype)
        return made


def _take_torchao(rewrite: _Rewrite, node: fx.Node) -> str | None:
    given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    value = value_of(weight)
    inputs = getattr(value, "act_quant_kwargs", None)
    reason = _decline_torchao(value, inputs)
    if reason is not None:
        return reason
    with rewrite.graph.inserting_before(node):
        values, scale = rewrite.node(getattr, weight, "qdata"), rewrite.node(getattr, weight, "scale")
        if inputs is None:
            arguments = (x, values, scale, bias)
            made: fx.Node | str = rewrite.graph.call_function(
                weight_only_linear.OP.overload, arguments, {"provider": rewrite.by}
            )
        else:
            made = rewrite.product(x, values, scale, bias, value_of(node).dtype)
    if isinstance(made, str):
        for unused in (scale, values):
            rewrite.graph.erase_node(unused)
        return made
    _replace(rewrite.graph, node, made)
    return None


def _decline_torchao(value: Any, inputs: Any) -> str | None:
    """Return why a weight of torchao stays as it is, or None."""
    kind, rows = _CLASSES[type(value).__name__], value.shape[0]
    if value.dim() != 2 or value.qdata.dtype != kind or tuple(value.scale.shape) != (rows, 1):
        return f"its weight has scales of shape {tuple(value.scale.shape)}, not one for each row"
    if inputs is None:
        return None if kind == INT8 else "weights in float8 alone are unpacked by Inductor as well"
    if type(getattr(inputs, "granularity", None)).__name__ != "PerRow":
        return "its inputs have no scale for each row"
    if getattr(getattr(inputs, "mapping_type", None), "name", "SYMMETRIC") != "SYMMETRIC":
        return "its inputs are quantized around an offset"
    if getattr(value, "act_pre_scale", None) is not None or getattr(value, "act_quant_scale", None) is not None:
        return "its inputs have factors or scales that were measured before"
    return None


def _take_fp8r(rewrite: _Rewrite, node: fx.Node) -> str | None:
    given = _arguments(node)
    found, weight, scale = _fp8r_input(node), _transposed(given["mat2"]), _row(given["scale_b"])
    if found is None or weight is None or scale is None or given.get("bias") or given.get("scale_result"):
        return "its product is not that of diffusers' linear in fp8r"
    out_dtype = given.get("out_dtype") or value_of(node).dtype
    with rewrite.graph.inserting_before(node):
        column = rewrite.node("unsqueeze", scale, 1)
        made = rewrite.product(found, weight, column, None, out_dtype)
        if isinstance(made, str):
            rewrite.graph.erase_node(column)
            return made
        flat = rewrite.node("reshape", made, -1, len(value_of(weight)))
    _replace(rewrite.graph, node, flat)
    return None


def _fp8r_input(node: fx.Node) -> fx.Node | None:
    """Return the input of a product whose rows are quantized by their largest magnitude, as diffusers writes it."""
    given = _arguments(node)
    q, scale = given.get("input"), given.get("scale_a")
    clamped = _operand(q, "to")
    divided = _operand(clamped, "clamp")
    x = _operand(divided, "truediv", "div")
    if x is None or q.args[1] != FP8 or divided.args[1] is not scale:  # type: ignore[union-attr]  # all are nodes
        return None
    largest = _operand(_operand(scale, "clamp"), "truediv", "div")
    reduced = _operand(largest, "amax")
    is_row = reduced is not None and _named(largest, 1, "dim") in (1, -1, [-1], [1]) and _named(largest, 2, "keepdim")
    if not is_row or _operand(reduced, "abs") is not x:
        return None
    wide = _operand(x, "float", "to")
    if wide is None or value_of(x).dtype != torch.float32:
        return None
    # The reshape to rows: without it, linears that read one value share its quantization.
    whole = _operand(wide, "reshape", "view", "flatten")
    columns = value_of(wide).shape[-1]
    return whole if whole is not None and value_of(whole).shape[-1] == columns else wide


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = ("input", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is(node: Any, *names: str) -> bool:
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in names


def _operand(node: Any, *names: str) -> fx.Node | None:
    """Return the first argument of a call of one of these functions or methods, or None."""
    found = node.args[0] if _is(node, *names) and node.args else None
    return found if isinstance(found, fx.Node) else None


def _named(node: Any, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _transposed(node: Any) -> fx.Node | None:
    if _is(node, "getattr") and node.args[1] == "T":
        return _operand(node, "getattr")
    # `weight.T` from torch 2.15 on.
    return _operand(node, "t", "transpose", "numpy_T")


def _row(node: Any) -> fx.Node | None:
    """Return the scales [N] of which a node makes a row [1, N]."""
    if _is(node, "getitem") and node.args[1] == (None, slice(None)):
        return _operand(node, "getitem")
    return _operand(node, "unsqueeze") if _is(node, "unsqueeze") and node.args[1:] == (0,) else None


def _replace(graph: fx.Graph, node: fx.Node, made: fx.Node) -> None:
    """Replace a node, and erase what only it read."""
    made.meta = {**made.meta, **{name: value for name, value in node.meta.items() if name != "example_value"}}
    made.meta["example_value"] = value_of(node)
    node.replace_all_uses_with(made)
    unused = [node]
    while unused:
        last = unused.pop()
        if last.users or last.op == "placeholder" or compat.operators.is_erased(last):
            continue
        inputs = last.all_input_nodes
        graph.erase_node(last)
        unused += inputs


PASS = Pass(NAME, quantized_weights)
