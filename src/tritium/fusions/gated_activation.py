"""Fuse the gating of GEGLU and SwiGLU, `activation(gate) * value`, into `tritium::gated_activation`.

Before:  silu(a) -> mul b        gelu(a) -> mul b
After:   tritium::gated_activation(a, b, activation), with the same formula: no approximation

Forms, in either operand order, with a and b of one shape: halves of one projection, two projections, slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tritium.fusions.expression import Expr, nodes_between, shape_of, strip_casts, strip_same
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.graph import same_shape, value_of
from tritium.ops import gated_activation


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a product of an activated and a plain floating-point value of one shape."""
    expr = recogniser.canon.of(node)
    if expr.op != "mul" or not isinstance(value_of(node), torch.Tensor):
        return None
    for activated, value in (expr.args, expr.args[::-1]):
        inner = strip_casts(activated)
        if not isinstance(inner, Expr) or inner.op not in ("silu", "gelu") or inner.node is None:
            continue
        gate = inner.args[0]
        if not isinstance(value, Expr) or not isinstance(gate, Expr) or gate.node is None:
            continue
        # `x * silu(scale)` with a broadcast scale is a modulation, not a gate.
        if not all(same_shape(shape_of(part), value_of(node).shape) for part in (value, inner)):
            continue
        nodes = {node, inner.node} | nodes_between(activated, inner)
        return Match(node, {"gate": gate, "value": strip_same(value), "activation": _name(inner)}, nodes)
    return None


def _name(activation: Expr) -> str:
    if activation.op == "silu":
        return "silu"
    return "gelu_tanh" if activation.attrs == ("tanh",) else "gelu"


def decline(match: Match) -> str | None:
    """Decline an activation in another dtype than its input, such as FP32SiLU: the op has one dtype."""
    gate, value = match.dtype("gate"), match.dtype("value")
    return (
        None
        if gate == value == match.out.dtype
        else f"the gate is {gate}, the value {value}, the result {match.out.dtype}"
    )


def arguments(match: Match) -> Mapping[str, Any]:
    bound = match.bindings
    return {name: bound[name] for name in ("gate", "value", "activation")} | {"out_dtype": match.out.dtype}


FUSION = Fusion(
    name="gated_activation",
    families=("gelu",),
    find=find,
    priority=30,
    replacement=gated_activation.OP,
    decline=decline,
    arguments=arguments,
    doc=__doc__,
)
