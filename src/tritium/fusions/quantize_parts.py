"""Quantize what a linear reads in one pass: after a GELU or a gate, over joined heads, over a concatenation of two parts.

Before:  gelu(x) -> tritium::quantize_rows                                   silu(a) * b -> tritium::quantize_rows
         attention -> transpose -> flatten -> tritium::quantize_rows          cat([a, gelu(b)], -1) -> tritium::quantize_rows
After:   tritium::quantize_parts([a, b], "plain,gelu_tanh", dtype, ...)

Values that Inductor computes by pointwise operations stay: it quantizes those in their own kernel. What attention or a
product wrote is read by a kernel of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.fusions.expression import Expr, shape_of
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.patterns import Pattern, captured, form, given, one_of, optional, site, tensor, value
from tritium.graph import same_shape
from tritium.ops import quantize_parts
from tritium.ops.quantize_parts import GATED

# Movements of elements: the value before was computed by what matters.
MOVED = ("same", "cast", "view", "reshape", "permute", "piece", "pieces", "index")

# Computed by kernels that Inductor does not generate.
EXTERN = ("attention", "linear", "scaled_linear")


def part(name: str) -> Pattern:
    """Match a part that is one tensor, captured by name, with its kind."""
    kind = f"{name}_kind"
    return one_of(
        given(form("gelu", tensor(name), attrs=("tanh",)), **{kind: "gelu_tanh"}),
        given(form("gelu", tensor(name), attrs=("none",)), **{kind: "gelu"}),
        given(form("reshape", tensor(name), casts=False), **{kind: "heads"}),
        given(tensor(name), **{kind: "plain"}),
    )


LAST = one_of(given(site("gated_activation"), last=None, last_kind=None), given(part("last"), gate=None))
JOINED = form("cat", part("first"), LAST, attrs=(value("dim"),), casts=False)
ROWS = optional(JOINED, LAST, first=None, first_kind=None, dim=None)


def parts_of(match: Match) -> list[tuple[str, list[Expr]]]:
    """Return the kind of each part, and its tensors."""
    bound = match.bindings
    last = [bound["gate"], bound["value"]] if bound["gate"] is not None else [bound["last"]]
    kind = bound["last_kind"] or bound["activation"] + GATED
    before = [] if bound["first"] is None else [(bound["first_kind"], [bound["first"]])]
    return [*before, (kind, last)]


def accept(match: Match) -> bool:
    """Accept a concatenation of the last dim, heads that are joined, and values that no pointwise operation computed."""
    rows, parts = shape_of(match.bindings["rows"]), parts_of(match)
    if rows is None or not all(_fits(kind, tensors[0], rows) for kind, tensors in parts):
        return False
    if len(parts) > 1:
        return bool(match.bindings["dim"] == len(rows) - 1)
    kind, (tensor, *_) = parts[0]
    return kind not in ("plain", "heads") or is_extern(tensor)


def _fits(kind: str, tensor: Expr, rows: Any) -> bool:
    """Return True if a part has the rows of the whole; heads have one more dim."""
    shape = shape_of(tensor)
    rank = len(rows) + (kind == "heads")
    return shape is not None and len(shape) == rank and same_shape(shape[: len(rows) - 1], rows[:-1])


def is_extern(tensor: Expr) -> bool:
    """Return True if a kernel wrote a value that Inductor does not generate, or it is an input of the graph."""
    while tensor.op in MOVED and isinstance(tensor.args[0], Expr):
        tensor = tensor.args[0]
    return tensor.op in EXTERN or (tensor.node is not None and tensor.node.op == "placeholder")


def arguments(match: Match) -> Mapping[str, Any]:
    parts = parts_of(match)
    tensors = [tensor for _, tensors in parts for tensor in tensors]
    return {**match.bindings, "parts": tensors, "kinds": ",".join(kind for kind, _ in parts)}


FUSION = Fusion(
    name="quantize_parts",
    families=("quantize_rows",),
    spellings=(
        form(
            "quantize_rows",
            captured("rows", ROWS),
            value("scale"),
            value("step"),
            attrs=(value("dtype"), value("rotate")),
        ),
    ),
    before=("linear_gelu", "cat_linear"),
    region=True,
    rounds=False,
    replacement=quantize_parts.OP,
    accept=accept,
    used_elsewhere="the value that is quantized is used elsewhere too, and would be computed twice",
    arguments=arguments,
    doc=__doc__,
)
