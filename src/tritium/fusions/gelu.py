"""Match GELU, in its tanh and its erf form. The formula is kept: no approximation.

Before:  gelu(x)
After:   tritium::gelu(x, approximate) if a provider is pinned; else unchanged, for Inductor to fuse with its neighbours
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser
from tritium.ops import gelu


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """Match a GELU operator; one written out as arithmetic is left as it is."""
    expr = recogniser.canon.of(node)
    return Match(node, {"x": expr.args[0], "approximate": expr.attrs[0]}, {node}) if expr.op == "gelu" else None


FUSION = Fusion(name="gelu", families=("gelu",), find=find, replacement=gelu.OP, doc=__doc__)
