"""Match GELU, in its tanh and its erf form. The formula is kept: no approximation.

Before:  gelu(x)
After:   tritium::gelu(x, approximate) if a provider is pinned; else unchanged, for Inductor to fuse with its neighbours

A GELU that is written out as arithmetic is left as it is.
"""

from __future__ import annotations

from tritium.fusions.fusion import Fusion
from tritium.fusions.patterns import form, value
from tritium.ops import gelu

FUSION = Fusion(
    name="gelu",
    families=("gelu",),
    spellings=(form("gelu", value("x"), attrs=(value("approximate"),)),),
    rounds=False,
    replacement=gelu.OP,
    doc=__doc__,
)
