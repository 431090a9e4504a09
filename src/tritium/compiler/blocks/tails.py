"""Move the end of a block into the next piece.

Before:  block 0: ..., y = linear(.), x1 = x + gate * y      block 1: norm(x1), linear(.), ...
After:   block 0: ..., y = linear(.)                         block 1: x1 = x + gate * y, norm(x1), linear(.), ...

The residual add then fuses with the following norm, as in a graph that is compiled whole. This saves a launch and a pass
over the stream per block. A node moves if no product and no attention of its block depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from tritium.compiler.blocks.facts import Facts, acts, name_of
from tritium.compiler.blocks.find import Group
from tritium.compiler.blocks.segments import is_item

_PRODUCTS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_scaled_mm", "_grouped_mm", "_int_mm"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *(f"conv{dims}d" for dims in (1, 2, 3)),
        *(f"conv_transpose{dims}d" for dims in (1, 2, 3)),
    )
)


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a product, attention or custom operator: nothing fuses into its kernel."""
    if node.op == "call_module" or node.target is operator.matmul:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace = str(node.target).partition(".")[0]
        return namespace != "aten" or name_of(node.target) in _PRODUCTS
    return name_of(node.target) in _PRODUCTS


def with_tails_moved(groups: Sequence[Group], facts: Facts) -> list[list[fx.Node]]:
    """Return the nodes of each group, with the end of each block moved to the next group."""
    moved: list[list[fx.Node]] = []
    carried: list[fx.Node] = []
    for index, group in enumerate(groups):
        nodes = [*carried, *group.nodes]
        tail = _tail(nodes, facts) if group.is_block and index < len(groups) - 1 else set()
        carried = [node for node in nodes if node in tail]
        moved.append([node for node in nodes if node not in tail])
    return [nodes for nodes in moved if nodes]


def _tail(nodes: Sequence[fx.Node], facts: Facts) -> set[fx.Node]:
    if not any(map(is_product, nodes)) or any(name_of(node.target).startswith("_enter") for node in nodes):
        return set()
    written = facts.written_by(nodes)
    kept: set[fx.Node] = set()
    for node in reversed(nodes):
        needed = any(user in kept for user in node.users)
        # Do not move nodes that use memory that the block writes: that could reorder the read and the write.
        touches = bool(written and facts.memory_of([node, *node.all_input_nodes]) & written)
        if needed or touches or is_product(node) or acts(node):
            kept.add(node)
    for node in nodes:
        # An item stays with the node that returns the tuple.
        if is_item(node) and node.all_input_nodes[0] in kept:
            kept.add(node)
    return set(nodes) - kept
