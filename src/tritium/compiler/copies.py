"""Copy graphs, and compare them by a fingerprint."""

from __future__ import annotations

from torch import fx


def copied(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, including attributes that Dynamo sets on nodes outside of `meta`."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda source: nodes[source])
        if hasattr(node, "_dynamo_source"):
            nodes[node]._dynamo_source = node._dynamo_source
    return copy


def with_graph(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return Dynamo's module with another graph and the attributes that AOTAutograd reads."""
    made = fx.GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    return made


def fingerprint(graph: fx.Graph) -> int:
    """Return a hash that is equal for graphs with the same operations in the same order."""
    index = {node: position for position, node in enumerate(graph.nodes)}
    return hash(
        tuple(
            (node.op, str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda source: index[source])))
            for node in graph.nodes
        )
    )
