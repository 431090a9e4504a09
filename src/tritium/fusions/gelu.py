"""Recognise GELU, in its tanh and its erf form. It is computed as written: nothing is approximated.

Before:  gelu(x)
After:   tritium::gelu(x, approximate) where that is pinned; else as it was, for Inductor to fuse into what it stands between
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import gelu


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """A whole GELU. One written out by hand is arithmetic: its constants are the model's business."""
    expr = recogniser.canon.of(node)
    return Match(node, {"x": expr.args[0], "approximate": expr.attrs[0]}, {node}) if expr.op == "gelu" else None


FUSION = Fusion(name="gelu", families=("gelu",), find=find, replacement=gelu.OP, doc=__doc__)
