"""Fuse GroupNorm and the SiLU after it, the pair in front of every convolution of a UNet or VAE.

Before:  group_norm(x) -> silu
After:   tritium::group_norm_silu(x, groups, weight, bias, eps)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium.fusions.expression import Expr, nodes_between, strip_casts
from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.graph import argument
from tritium.ops import group_norm_silu

CONVOLUTIONS = frozenset({F.conv2d, F.conv3d, torch.conv2d, torch.conv3d})
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a SiLU whose operand is a GroupNorm, with casts and eval dropout between them."""
    expr = recogniser.canon.of(node)
    if expr.op != "silu":
        return None
    norm = strip_casts(expr.args[0])
    if not isinstance(norm, Expr) or norm.op != "group_norm" or norm.node is None:
        return None
    nodes = {node, norm.node} | nodes_between(expr.args[0], norm)
    x, weight, bias = norm.args
    groups, eps = norm.attrs
    bindings = {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": eps}
    match = recogniser.closed(Match(node, bindings, nodes))
    # ATen's GroupNorm on a GPU loses channels-last; the op keeps it, and convolutions prefer it.
    # Fidelity 'exact' still compares strides.
    match.any_layout = _feeds_convolutions(match.root)
    return match


def _feeds_convolutions(node: fx.Node) -> bool:
    """Return True if only convolutions read a value, directly or after a conversion to channels-last."""
    return bool(node.users) and all(
        user.target in CONVOLUTIONS
        or (user.target == "contiguous" and user.kwargs.get("memory_format") in CHANNELS_LAST)
        or (user.target is F.dropout and not argument(user, 2, "training", True) and _feeds_convolutions(user))
        for user in node.users
    )


FUSION = Fusion(
    name="group_norm_silu",
    families=("group_norm_silu",),
    find=find,
    replacement=group_norm_silu.OP,
    doc=__doc__,
)
