"""Canonical forms of the ops that the pass `quantize` writes.

tritium::quantize_rows(x, dtype, rotate, scale, step)      -> quantize_rows(x, scale, step), dtype and rotation in its attributes
tritium::scaled_linear(q, scale, w, w_scale, bias)         -> scaled_linear(q, scale, w, w_scale, bias)
"""

from __future__ import annotations

from torch import fx

from tritium import ops
from tritium.fusions.expression import Expr, Forms, Of
from tritium.ops import quantize_rows, scaled_linear

FORMS = Forms("quantized")

# Registers the operators, which are the targets.
ops.catalog()


@FORMS.builder(quantize_rows.OP.overload)
def _quantize_rows(of: Of, node: fx.Node) -> Expr | None:
    given = quantize_rows.OP.bind(*node.args)
    return Expr("quantize_rows", (of(given.x), of(given.scale), of(given.step)), node, (given.dtype, given.rotate))


@FORMS.builder(scaled_linear.OP.overload)
def _scaled_linear(of: Of, node: fx.Node) -> Expr | None:
    given = scaled_linear.OP.bind(*node.args)
    return Expr(
        "scaled_linear", tuple(map(of, (given.q, given.scale, given.weight, given.weight_scale, given.bias))), node
    )
