"""Recognise a gated residual, the norm of it and its modulation as one region.

Before:  x + gate * y -> norm -> mul (1 + scale) -> add shift
After:   one region; its parts are counted and computed in their own families, no single op takes it over yet
"""

from __future__ import annotations

from torch import fx

from tritium.fusions.fusion import Fusion, Match
from tritium.fusions.match import Recogniser


def find(recogniser: Recogniser, node: fx.Node) -> Match | None:
    """An adaptive norm whose input is a gated residual."""
    site = recogniser.sites.get(node)
    if site is None or site[0].name != "adalayernorm":
        return None
    modulated = site[1]
    residual = recogniser.site_at(modulated.bindings["x"], "gated_residual")
    if residual is None:
        return None
    nodes = modulated.nodes | modulated.inner | residual.nodes
    return Match(node, {}, {node}, nodes - {node}, covers=("adalayernorm", "mul_add", *modulated.covers))


FUSION = Fusion(
    name="residual_norm_modulate", families=("residual_norm_modulate",), find=find, region=True, doc=__doc__
)
