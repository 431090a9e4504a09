"""Properties of a whole graph that policies read."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

# With fewer nodes per convolution, a graph is a decoder or UNet and not a transformer with a patch embedding.
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
    """Return the 2-D and 3-D convolutions of Dynamo's graph, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in _SPATIAL]


def is_dynamic(graph: fx.Graph) -> bool:
    """Return True if a placeholder has free symbols: a size may change without a recompile."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_symbols(value):
            return True
    return False


def is_conv_heavy(graph: fx.Graph) -> bool:
    """Return True if convolutions dominate: fewer than 300 nodes for each."""
    convolutions = sum(node.op == "call_function" and node.target in _CONVOLUTIONS for node in graph.nodes)
    return bool(len(graph.nodes) < NODES_PER_CONVOLUTION * convolutions)
