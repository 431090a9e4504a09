"""Canonical forms of operators that Dynamo keeps whole: norms, activations, linear, attention.

F.layer_norm(x, (d,), w, b, eps)            -> layer_norm(x, w, b), eps in its attributes
F.group_norm(x, groups, w, b, eps)          -> group_norm(x, w, b)
F.rms_norm(x, (d,), w, eps)                 -> mul(mul(x, rsqrt(add(mean(square(x)), eps))), w)
F.gelu(x, approximate="tanh")               -> gelu(x), tanh or none in its attributes
F.linear(x, w, b)                           -> linear(x, w, b)
F.scaled_dot_product_attention(q, k, v)     -> attention(q, k, v, mask, scale), dropout, causality, groups in its attributes
x.sum(-1)                                   -> sum(x), the dim counted from the front in its attributes
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium import compat
from tritium.fusions.expression import Expr, Forms, Of, add, dtype_of, mul, shape_of
from tritium.graph import argument

FORMS = Forms("operators")


def _is_over_the_last_dim(node: fx.Node) -> bool:
    shape = argument(node, 1, "normalized_shape")
    return isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1


@FORMS.builder(F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm)
def _norm(of: Of, node: fx.Node) -> Expr | None:
    """Accept a LayerNorm over the last dim only, as in diffusion transformers."""
    operands = (of(node.args[0]), of(argument(node, 2, "weight")), of(argument(node, 3, "bias")))
    eps = of(argument(node, 4, "eps", 1e-5))
    if node.target in (F.group_norm, torch.group_norm):
        return Expr("group_norm", operands, node, attrs=(argument(node, 1, "num_groups"), eps))
    return Expr("layer_norm", operands, node, attrs=(eps,)) if _is_over_the_last_dim(node) else None


@FORMS.builder(F.rms_norm, torch.rms_norm)
def _rms_norm(of: Of, node: fx.Node) -> Expr | None:
    operand, weight, eps = of(node.args[0]), of(argument(node, 2, "weight")), of(argument(node, 3, "eps"))
    if not _is_over_the_last_dim(node):
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


@FORMS.builder(F.gelu, compat.operators.NN.gelu)
def _gelu(of: Of, node: fx.Node) -> Expr | None:
    approximate = argument(node, 1, "approximate", "none")
    return Expr("gelu", (of(node.args[0]),), node, attrs=(approximate,))


@FORMS.builder(F.linear, compat.operators.NN.linear)
def _linear(of: Of, node: fx.Node) -> Expr | None:
    weight, bias = (of(argument(node, index, name)) for index, name in ((1, "weight"), (2, "bias")))
    return Expr("linear", (of(node.args[0]), weight, bias), node)


@FORMS.builder(F.scaled_dot_product_attention)
def _attention(of: Of, node: fx.Node) -> Expr | None:
    names = ("query", "key", "value", "attn_mask")
    q, k, v, mask = (of(argument(node, index, name)) for index, name in enumerate(names))
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", default=False)
    scale, grouped = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
    return Expr("attention", (q, k, v, mask, of(scale)), node, attrs=(dropout, causal, grouped))


@FORMS.builder(F.normalize)
def _normalize(of: Of, node: fx.Node) -> Expr | None:
    """Return `x / max(norm(x), eps)` over one dim, counted from the front."""
    operand = of(node.args[0])
    p, dim = argument(node, 1, "p", 2.0), argument(node, 2, "dim", 1)
    shape = shape_of(operand)
    if p != 2 or not isinstance(dim, int) or shape is None:
        return None
    eps = argument(node, 3, "eps", 1e-12)
    return Expr("normalize", (operand,), node, attrs=(dim % len(shape), eps))


@FORMS.builder(torch.sum, "sum")
def _sum(of: Of, node: fx.Node) -> Expr | None:
    """Accept only a sum over one dim that drops it."""
    operand, dim = of(node.args[0]), argument(node, 1, "dim")
    shape = shape_of(operand)
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    if shape is None or len(dims) != 1 or not isinstance(dims[0], int) or node.kwargs.get("dtype") is not None:
        return None
    if argument(node, 2, "keepdim", default=False) is not False:
        return None
    return Expr("sum", (operand,), node, attrs=(dims[0] % len(shape),))
