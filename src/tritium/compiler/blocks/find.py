"""Find repeated blocks by the modules that nodes come from.

A level is a depth of nesting. At level 1 a node belongs to the outermost numbered module around it
(`transformer_blocks.3`), at level 2 to the next one inside (`attentions.1`), and so on. The keys of blocks determine
whether two blocks are equal.

The end of a block behind its last product moves to the next group:

Before:  block 0: ..., y = linear(.), x1 = x + gate * y      block 1: norm(x1), linear(.), ...
After:   block 0: ..., y = linear(.)                         block 1: x1 = x + gate * y, norm(x1), linear(.), ...

The residual add then fuses with the following norm, as in a graph that is compiled whole. This saves a launch and a pass
over the stream per block. A node moves if no product and no attention of its block depends on it.

What the model itself computes between two blocks, without values of a block, moves in front of the blocks if it is small:
Chroma takes the modulation of each block from one table, and the row numbers would make every block a piece of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from tritium import compat
from tritium.compiler.blocks.segments import Facts, acts, is_item, name_of
from tritium.graph import value_of

# The most numbered modules around a node in stock models is four: down_blocks.0.attentions.1.transformer_blocks.0.ff.net.0.
DEEPEST = 4

# A rewrite can leave nodes of another block inside a block: at most this many are ignored.
MOST_STRAYS = 2

# The most elements of a value that is computed before the blocks, and kept until its block has run.
MOST_MOVED = 2**20

_NUMBERED = re.compile(r"(?:\.|\[')\d+(?:'\])?$")

_PRODUCTS = frozenset(
    """
    linear matmul mm bmm addmm baddbmm einsum _scaled_mm _grouped_mm _int_mm scaled_dot_product_attention
    multi_head_attention_forward conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    """.split()  # noqa: SIM905 - shorter than one name per line
)

# The innermost module of a block that a node belongs to; None for a part between blocks.
Label = str | None


class Group(NamedTuple):
    """Some nodes in order, and whether they are a block or a part between blocks."""

    nodes: list[fx.Node]
    is_block: bool


def deepest_level(calls: Sequence[fx.Node]) -> int:
    """Return how many levels of numbered modules there are around some operations."""
    return min(DEEPEST, max((len(_numbered(node)) for node in calls), default=0))


def by_modules(facts: Facts, level: int) -> list[Group]:
    """Return operations in groups: the blocks at a level of nesting, and the parts between them."""
    calls = _with_small_ones_early(facts)
    stacks = {node: _numbered(node) for node in calls}
    containers = {entry for stack in stacks.values() for entry in stack[: min(level, len(stack)) - 1]}
    labels: list[Label] = []
    for node in calls:
        stack = stacks[node]
        if is_item(node) or not compat.dynamo.module_stack(node):
            # A rewritten node belongs to no module: it stays with the node before it.
            labels.append(labels[-1] if labels else None)
        else:
            entry = stack[min(level, len(stack)) - 1] if stack and level else None
            labels.append(None if entry in containers else entry)
    for place in range(len(calls) - 2, -1, -1):
        if name_of(calls[place].target).startswith("_enter"):
            # A mode is entered for the next node.
            labels[place] = labels[place + 1]
    labels = _without_strays(labels)
    return [Group(list(calls[start:end]), labels[start] is not None) for start, end in _runs(labels)]


def _with_small_ones_early(facts: Facts) -> list[fx.Node]:
    """Return operations in order, except small ones of the model itself, which follow the values that they read."""
    calls = facts.calls
    # A mode that is entered concerns all operations up to its end.
    if any(name_of(node.target).startswith("_enter") for node in calls):
        return calls
    written = facts.written_by(calls)
    places: dict[fx.Node, tuple[int, int]] = {}
    outside: set[fx.Node] = set()
    for place, node in enumerate(calls):
        places[node] = (place, 0)
        if not compat.dynamo.is_traced(node) or _numbered(node):
            continue
        outside.add(node)
        sources = [source for source in node.all_input_nodes if source in places]
        is_own = not compat.dynamo.module_stack(node) and not is_item(node) and outside.issuperset(sources)
        # Reading or viewing memory that is written anywhere keeps its place.
        is_stable = written.isdisjoint(facts.memory_of([node, *node.all_input_nodes]))
        if is_own and is_stable and not acts(node) and _is_small(node, facts):
            places[node] = (max((places[source][0] for source in sources), default=-1), place)
    return sorted(calls, key=places.__getitem__)


def _is_small(node: fx.Node, facts: Facts) -> bool:
    """Return whether a value is a view of its arguments, or has few elements."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return False
    sizes = [size if isinstance(size, int) else compat.dynamo.size_hint(size) for size in value.shape]
    is_view = facts.storages[node] <= facts.memory_of(node.all_input_nodes)
    return is_view or (None not in sizes and math.prod(sizes) <= MOST_MOVED)


def _numbered(node: fx.Node) -> list[str]:
    """Return the numbered modules around a node, outermost first."""
    return [key for key, name in compat.dynamo.module_stack(node) if _NUMBERED.search(name)]


def _without_strays(labels: list[Label]) -> list[Label]:
    """Relabel a few foreign nodes inside a block: a rewrite can move nodes of the previous block there."""
    result = list(labels)
    runs = _runs(labels)
    for before, (start, end), after in zip(runs, runs[1:], runs[2:], strict=False):
        if end - start <= MOST_STRAYS and labels[before[0]] == labels[after[0]]:
            result[start:end] = [labels[before[0]]] * (end - start)
    return result


def _runs(labels: Sequence[Label]) -> list[tuple[int, int]]:
    starts = [place for place, label in enumerate(labels) if place == 0 or label != labels[place - 1]]
    return list(zip(starts, [*starts[1:], len(labels)], strict=True))


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a product, attention or custom operator: nothing fuses into its kernel."""
    operators = compat.operators
    if node.op == "call_module" or isinstance(node.target, operators.HigherOrderOperator):
        return True
    is_operator = isinstance(node.target, (operators.OpOverload, operators.OpOverloadPacket))
    is_custom = is_operator and not str(node.target).startswith("aten.")
    return is_custom or name_of(node.target) in _PRODUCTS


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
