"""Questions about a whole graph that a policy may ask."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

# A graph with fewer nodes a convolution than this is a decoder or UNet rather than a transformer with a patch embedding.
NODES_PER_CONVOLUTION = 300

_CONVOLUTIONS = frozenset(
    {
        *(getattr(torch, f"conv{transpose}{rank}d") for transpose in ("", "_transpose") for rank in (1, 2, 3)),
        *(getattr(F, f"conv{transpose}{rank}d") for transpose in ("", "_transpose") for rank in (1, 2, 3)),
        torch.convolution,
        torch.ops.aten.convolution.default,
    }
)


_SPATIAL = frozenset(
    getattr(space, f"conv{transpose}{rank}d")
    for space in (torch, F)
    for transpose in ("", "_transpose")
    for rank in (2, 3)
)


def spatial_convolutions(graph: fx.Graph) -> list[fx.Node]:
    """The 2-D and 3-D convolutions of Dynamo's graph, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in _SPATIAL]


def is_dynamic(graph: fx.Graph) -> bool:
    """Whether a placeholder carries free symbols: some size may change without a recompile."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_symbols(value):
            return True
    return False


def is_conv_heavy(graph: fx.Graph) -> bool:
    """Whether convolutions dominate: fewer than 300 nodes for each."""
    convolutions = sum(node.op == "call_function" and node.target in _CONVOLUTIONS for node in graph.nodes)
    return bool(len(graph.nodes) < NODES_PER_CONVOLUTION * convolutions)
