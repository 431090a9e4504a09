"""Recognise the sites of all fusions, choose a provider for each, and rewrite those that an owned kernel takes over.

Before:  the region as the model spells it
After:   tritium::<op>(..., provider="triton")   where an owned provider was chosen; unchanged where Inductor keeps it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from tritium import ops
from tritium.errors import ProviderError
from tritium.fusions import Fusion, Match
from tritium.fusions.expression import Expr, value_of
from tritium.fusions.match import Recogniser
from tritium.ops import INDUCTOR, REFERENCE, Op
from tritium.passes import Pass, PassContext
from tritium.report import Outcome, Site

# Where a region ends in the graph, and what replaces it.
Rewrite = tuple[int, Callable[[], None]]

LEFT_TO_INDUCTOR = "left to Inductor: no owned kernel is measured faster here"


def make_pass(fusions: Iterable[Fusion]) -> Pass:
    """The fuse pass over a set of fusions."""
    known = tuple(fusions)

    def run(graph: fx.Graph, context: PassContext) -> None:
        fuse(graph, context, known)

    return Pass("fuse", run)


def fuse(graph: fx.Graph, context: PassContext, fusions: Iterable[Fusion]) -> None:
    recogniser = Recogniser(graph)
    found = recogniser.find(list(fusions))
    # All sites are judged on the graph as Dynamo made it, before the first rewrite changes it.
    rewrites: list[Rewrite] = []
    for fusion, match in found:
        outcome, reason = _judge(fusion, match, recogniser, context, rewrites)
        context.sites.append(Site(fusion.name, fusion.families, outcome, reason, match.root.name, match.source_line))
    # Last first: what a site reads is then never yet replaced.
    for _, rewrite in sorted(rewrites, key=operator.itemgetter(0), reverse=True):
        rewrite()


def _judge(
    fusion: Fusion, match: Match, recogniser: Recogniser, context: PassContext, rewrites: list[Rewrite]
) -> tuple[Outcome, str]:
    reason = _reason_to_decline(fusion, match, recogniser, context)
    if reason is not None:
        return "declined", reason
    op = fusion.replacement
    if op is None:
        return "inductor", LEFT_TO_INDUCTOR
    arguments = fusion.arguments_of(match)
    provider, why = choose_provider(op, arguments, context)
    if provider == INDUCTOR:
        return "inductor", why
    reason = _changed_meta(op, arguments, match)
    if reason is not None:
        return "declined", reason
    position = max(recogniser.position[node] for node in (match.root, *match.writes))
    rewrites.append((position, lambda: _rewrite(op, arguments, provider, match)))
    return "fused", why


def _reason_to_decline(fusion: Fusion, match: Match, recogniser: Recogniser, context: PassContext) -> str | None:
    off = [family for family in fusion.families if not context.config.fusion_patterns.enables(family)]
    if off:
        return f"switched off: fusion_patterns for {', '.join(off)}"
    return context.read_only or recogniser.hazard(match) or fusion.decline(match)


def choose_provider(op: Op, arguments: dict[str, Any], context: PassContext) -> tuple[str, str]:
    """Which provider computes a site, and why."""
    pinned = context.config.provider_for(op.name)
    owned = ops.providers(op)
    if pinned is None:
        if context.config.engine == "eager":
            return REFERENCE, "engine 'eager' runs the op's reference"
        return INDUCTOR, LEFT_TO_INDUCTOR
    if pinned in (INDUCTOR, REFERENCE):
        return pinned, f"pinned by force_provider={pinned!r}"
    if pinned not in owned:
        if isinstance(context.config.force_provider, str):
            return INDUCTOR, f"op {op.name!r} has no provider {pinned!r}"
        able = ", ".join([INDUCTOR, REFERENCE, *owned])
        raise ProviderError(f"force_provider: op {op.name!r} has no provider {pinned!r}; it has {able}")
    reason = owned[pinned].decline(**{name: _fake(value) for name, value in arguments.items()})
    if reason is not None:
        able = ", ".join([INDUCTOR, REFERENCE])
        raise ProviderError(
            f"provider {pinned!r} of op {op.name!r} cannot be used: {reason}; providers that can: {able}"
        )
    return pinned, f"pinned by force_provider={pinned!r}"


def _fake(value: Any) -> Any:
    if not isinstance(value, Expr) or value.node is not None or value.op != "view":
        return value.value if isinstance(value, Expr) else value
    # A view no node holds: what the model's view of `1 + s` shows, with the dtype of s.
    source, shown = _fake(value.args[0]), value_of(value.attrs[0])
    with shown.fake_mode:
        return source.new_empty(shown.shape)


def _changed_meta(op: Op, arguments: dict[str, Any], match: Match) -> str | None:
    """How the replacement's result would differ from the value it replaces, or None."""
    fakes = {name: _fake(value) for name, value in arguments.items()}
    mode = getattr(match.out, "fake_mode", None)
    if mode is None:
        return "nothing is known about the value's shape"
    with mode:
        made = op.fake(**fakes)
    if made.dtype != match.out.dtype:
        return f"the replacement gives {made.dtype} where the model has {match.out.dtype}"
    if made.shape != match.out.shape:
        return f"the replacement gives shape {tuple(made.shape)} where the model has {tuple(match.out.shape)}"
    if made.stride() != match.out.stride():
        return "the value is not contiguous, and the replacement's would be"
    return None


def _rewrite(op: Op, arguments: dict[str, Any], provider: str, match: Match) -> None:
    graph, root = match.root.graph, match.root
    if not root.users:
        # Part of a larger region that has taken it over.
        _erase(match)
        return
    place = match.writes[-1].next if match.writes else root
    with graph.inserting_before(place):
        given = tuple(_concrete(graph, value) for value in arguments.values())
        new = graph.call_function(op.overload, given, {"provider": provider})
    new.meta = dict(root.meta)
    # What reads the value before it is complete, as the writes themselves do, keeps reading the unfinished tensor.
    earlier = {user for user in root.users if user < new}
    root.replace_all_uses_with(new, delete_user_cb=lambda user: user not in earlier)
    _erase(match)


def _erase(match: Match) -> None:
    graph = match.root.graph
    for write in reversed(match.writes):
        graph.erase_node(write)
    for node in sorted(match.nodes | match.inner, reverse=True):
        if not node.users and node not in match.writes:
            graph.erase_node(node)


def _concrete(graph: fx.Graph, value: Any) -> Any:
    """A node for an expression, made where no node holds it; a number for a number."""
    if not isinstance(value, Expr):
        return value
    known = value.value
    if value.node is None:
        return _made(graph, value)
    # `dynamic=True` makes an eps an input. It is a constant of the model: guard on it, as Inductor would.
    return float(known) if isinstance(known, (torch.SymFloat, torch.SymInt)) else value.node


def _made(graph: fx.Graph, value: Expr) -> fx.Node:
    """A view that the model takes of `1 + s`, taken of s."""
    if value.op != "view" or not value.attrs:
        raise TypeError(f"no node holds {value}")
    view = value.attrs[0]
    source = _concrete(graph, value.args[0])
    made = graph.create_node(view.op, view.target, (source, *view.args[1:]), dict(view.kwargs))
    fake = _fake(value)
    made.meta = {"example_value": fake} if fake is not None else {}
    return made
