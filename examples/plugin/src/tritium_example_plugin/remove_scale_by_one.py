"""Remove multiplications by one, and request the tanh that vectorises.

Before:  mul(x, 1.0) -> ...
After:   x -> ...
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tritium.plugins import ConfigRequest, Pass, PassContext


def run(graph: fx.Graph, context: PassContext) -> ConfigRequest | None:
    for node in list(graph.find_nodes(op="call_function", target=operator.mul)):
        x, factor = node.args
        value, result = (source.meta.get("example_value") for source in (x, node) if isinstance(source, fx.Node))
        # An integer tensor times 1.0 is a float tensor: remove only multiplications that keep the dtype.
        if factor == 1 and isinstance(value, torch.Tensor) and value.dtype == result.dtype:
            node.replace_all_uses_with(x)
            graph.erase_node(node)
    if context.device_type != "cpu":
        return None
    return ConfigRequest(
        {"cpp.use_decompose_tanh": True}, because="the vectorised tanh is slow on this package's models"
    )


PASS = Pass("remove_scale_by_one", run)
