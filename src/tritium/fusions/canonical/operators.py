"""Canonical forms of operators that Dynamo keeps whole: norms, activations, linear, attention.

F.layer_norm(x, (d,), w, b, eps)            -> layer_norm(x, w, b), eps in its attributes
F.group_norm(x, groups, w, b, eps)          -> group_norm(x, w, b)
F.rms_norm(x, (d,), w, eps)                 -> mul(mul(x, rsqrt(add(mean(square(x)), eps))), w)
F.gelu(x, approximate="tanh")               -> gelu(x), tanh or none in its attributes
F.silu(x), torch.tanh(x), torch.sigmoid(x)  -> silu(x), tanh(x), sigmoid(x)
F.linear(x, w, b)                           -> linear(x, w, b)
F.scaled_dot_product_attention(q, k, v)     -> attention(q, k, v, mask, scale), dropout, causality, groups in its attributes
x.sum(-1)                                   -> sum(x), the dim counted from the front in its attributes
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium import compat
from tritium.fusions.expression import Canonicaliser, Expr, add, builder, dtype_of, mul, shape_of
from tritium.graph import argument


@builder(F.layer_norm, torch.layer_norm)
def _layer_norm(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    """Accept only the last dim, as in diffusion transformers."""
    operand, shape = canon.of(node.args[0]), argument(node, 1, "normalized_shape")
    if not isinstance(shape, (tuple, list, torch.Size)) or len(shape) != 1:
        return None
    weight, bias = (canon.of(argument(node, index, name)) for index, name in ((2, "weight"), (3, "bias")))
    eps = canon.of(argument(node, 4, "eps", 1e-5))
    return Expr("layer_norm", (operand, weight, bias), node, attrs=(eps,))


@builder(F.group_norm, torch.group_norm)
def _group_norm(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    operand, groups = canon.of(node.args[0]), argument(node, 1, "num_groups")
    weight, bias = (canon.of(argument(node, index, name)) for index, name in ((2, "weight"), (3, "bias")))
    eps = canon.of(argument(node, 4, "eps", 1e-5))
    return Expr("group_norm", (operand, weight, bias), node, attrs=(groups, eps))


@builder(F.rms_norm, torch.rms_norm)
def _rms_norm(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    operand = canon.of(node.args[0])
    shape = argument(node, 1, "normalized_shape")
    weight, eps = canon.of(argument(node, 2, "weight")), canon.of(argument(node, 3, "eps"))
    if not isinstance(shape, (tuple, list, torch.Size)) or len(shape) != 1:
        return None
    if eps is None:
        dtype = dtype_of(operand)
        if dtype is None:
            return None
        # As in ATen: the eps of the dtype in which it computes.
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    inverse = Expr("rsqrt", (add(Expr("mean", (Expr("square", (operand,)),), attrs=(-1,)), eps),))
    if weight is None:
        return mul(operand, inverse, node)
    return Expr("mul", (Expr("mul", (operand, inverse)), weight), node)


@builder(F.gelu, compat.operators.NN.gelu)
def _gelu(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    approximate = argument(node, 1, "approximate", "none")
    return Expr("gelu", (canon.of(node.args[0]),), node, attrs=(approximate,))


def _unary(name: str) -> Any:
    def build(canon: Canonicaliser, node: fx.Node) -> Expr | None:
        # An in-place activation writes to its operand: its result is not a new value.
        if node.kwargs.get("inplace") or argument(node, 1, "inplace", default=False) is True:
            return None
        return Expr(name, (canon.of(node.args[0]),), node)

    return build


for _name, _targets in {
    "silu": (F.silu, "silu"),
    "tanh": (torch.tanh, F.tanh, "tanh"),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid"),
}.items():
    builder(*_targets)(_unary(_name))


@builder(F.linear, compat.operators.NN.linear)
def _linear(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    weight, bias = (canon.of(argument(node, index, name)) for index, name in ((1, "weight"), (2, "bias")))
    return Expr("linear", (canon.of(node.args[0]), weight, bias), node)


@builder(F.scaled_dot_product_attention)
def _attention(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    names = ("query", "key", "value", "attn_mask")
    q, k, v, mask = (canon.of(argument(node, index, name)) for index, name in enumerate(names))
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", default=False)
    scale, grouped = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    return Expr("attention", (q, k, v, mask, canon.of(scale)), node, attrs=(dropout, causal, grouped))


@builder(F.normalize)
def _normalize(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    """Return `x / max(norm(x), eps)` over one dim, counted from the front."""
    operand = canon.of(node.args[0])
    p, dim = argument(node, 1, "p", 2.0), argument(node, 2, "dim", 1)
    shape = shape_of(operand)
    if p != 2 or not isinstance(dim, int) or shape is None:
        return None
    eps = argument(node, 3, "eps", 1e-12)
    return Expr("normalize", (operand,), node, attrs=(dim % len(shape), eps))


@builder(torch.sum, "sum")
def _sum(canon: Canonicaliser, node: fx.Node) -> Expr | None:
    """Accept only a sum over one dim that drops it."""
    operand, dim = canon.of(node.args[0]), argument(node, 1, "dim")
    shape = shape_of(operand)
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if shape is None or len(dims) != 1 or not isinstance(dims[0], int) or node.kwargs.get("dtype") is not None:
        return None
    if argument(node, 2, "keepdim", default=False) is not False:
        return None
    return Expr("sum", (operand,), node, attrs=(dims[0] % len(shape),))
