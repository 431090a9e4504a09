"""Recognise the sites of all fusions, choose a provider for each, and rewrite those that an owned kernel takes over.

Before:  the region as the model spells it
After:   tritium::<op>(..., provider="triton")   where an owned provider was chosen; unchanged where Inductor keeps it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tritium import ops
from tritium.compiler.exact import NOT_EQUAL, bit_equal
from tritium.config import CompilationConfig
from tritium.errors import ProviderError, nearest
from tritium.fusions import Fusion, Match
from tritium.fusions.expression import Expr, same_shape, value_of
from tritium.fusions.match import Recogniser
from tritium.ops import INDUCTOR, REFERENCE, Op
from tritium.passes import Pass, PassContext
from tritium.report import Outcome, Site

LEFT_TO_INDUCTOR = "left to Inductor: no owned kernel is measured faster here"


def make_pass(fusions: Iterable[Fusion]) -> Pass:
    """The fuse pass over a set of fusions."""
    known = tuple(fusions)

    def run(graph: fx.Graph, context: PassContext) -> None:
        fuse(graph, context, known)

    return Pass("fuse", run)


@dataclass
class Judged:
    """What is to become of one site."""

    fusion: Fusion
    match: Match
    outcome: Outcome
    reason: str
    op: Op | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    provider: str = ""

    def decline(self, reason: str) -> None:
        self.outcome, self.reason = "declined", reason

    def compute(self, value: Callable[[Any], Any]) -> torch.Tensor:
        """The replacement's result, given the values of expressions."""
        assert self.op is not None
        return self.op.overload(*map(value, self.arguments.values()), provider=self.provider)  # type: ignore[no-any-return]


def fuse(graph: fx.Graph, context: PassContext, fusions: Iterable[Fusion]) -> None:
    recogniser = Recogniser(graph)
    # All sites are judged on the graph as Dynamo made it, before the first rewrite changes it.
    judged = [_judge(fusion, match, recogniser, context) for fusion, match in recogniser.find(list(fusions))]
    if context.config.fidelity == "exact":
        _keep_bit_equal(graph, context, [site for site in judged if site.outcome == "fused"])
    for site in judged:
        fusion, match = site.fusion, site.match
        context.sites.append(
            Site(fusion.name, fusion.families, site.outcome, site.reason, match.root.name, match.source_line)
        )

    def place(site: Judged) -> tuple[int, bool]:
        return max(recogniser.position[node] for node in (site.match.root, *site.match.writes)), site.fusion.region

    # Last first: what a site reads is then never yet replaced. A region goes before the site that ends where it ends.
    for site in sorted((site for site in judged if site.outcome == "fused"), key=place, reverse=True):
        _rewrite(site)


def _keep_bit_equal(graph: fx.Graph, context: PassContext, sites: list[Judged]) -> None:
    if not sites:
        return
    gm = fx.GraphModule(torch.nn.Module(), graph)
    equal = bit_equal(gm, context.example_inputs, [(site.match, site.compute) for site in sites])
    for site, same in zip(sites, equal, strict=True):
        if not same:
            site.decline(NOT_EQUAL)


def _judge(fusion: Fusion, match: Match, recogniser: Recogniser, context: PassContext) -> Judged:
    reason = _reason_to_decline(fusion, match, recogniser, context)
    if reason is not None:
        return Judged(fusion, match, "declined", reason)
    op = fusion.replacement
    if op is None:
        return Judged(fusion, match, "inductor", LEFT_TO_INDUCTOR)
    arguments = fusion.arguments_of(match)
    provider, why = choose_provider(op, arguments, context)
    if provider == INDUCTOR:
        return Judged(fusion, match, "inductor", why)
    reason = _changed_meta(op, arguments, match)
    if reason is not None:
        return Judged(fusion, match, "declined", reason)
    return Judged(fusion, match, "fused", why, op, arguments, provider)


def _reason_to_decline(fusion: Fusion, match: Match, recogniser: Recogniser, context: PassContext) -> str | None:
    off = [family for family in fusion.families if not context.config.fusion_patterns.enables(family)]
    if off:
        return f"switched off: fusion_patterns for {', '.join(off)}"
    inside = [family for family in match.covers if not context.config.fusion_patterns.enables(family)]
    if inside:
        return f"it covers {', '.join(inside)}, switched off in fusion_patterns"
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
    for_every_op = isinstance(context.config.force_provider, str)
    if pinned not in owned:
        # Checked when the backend was made: some op has it, this one does not.
        return INDUCTOR, f"op {op.name!r} has no provider {pinned!r}"
    reason = owned[pinned].decline(**{name: _fake(value) for name, value in arguments.items()})
    if reason is None:
        return pinned, f"pinned by force_provider={pinned!r}"
    if for_every_op:
        return INDUCTOR, f"provider {pinned!r} cannot take it: {reason}"
    able = ", ".join([INDUCTOR, REFERENCE])
    raise ProviderError(f"provider {pinned!r} of op {op.name!r} cannot be used: {reason}; providers that can: {able}")


def check_pins(config: CompilationConfig) -> None:
    """Raise for a pinned provider or op that does not exist: it would otherwise be ignored at every site."""
    known = {name: [INDUCTOR, REFERENCE, *ops.providers(op)] for name, op in ops.catalog().items()}
    if isinstance(config.force_provider, str):
        every = {provider for providers in known.values() for provider in providers}
        if config.force_provider not in every:
            raise ProviderError(
                f"force_provider: no op has {config.force_provider!r}; {nearest(config.force_provider, every)}"
            )
        return
    for op, provider in dict(config.force_provider or ()).items():
        if op not in known:
            raise ProviderError(f"force_provider: there is no op {op!r}; {nearest(op, known)}")
        if provider not in known[op]:
            raise ProviderError(
                f"force_provider: op {op!r} has no provider {provider!r}; it has {', '.join(known[op])}"
            )


def _fake(value: Any) -> Any:
    if isinstance(value, list):
        return [_fake(part) for part in value]
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
    if not same_shape(made.shape, match.out.shape):
        return f"the replacement gives shape {tuple(made.shape)} where the model has {tuple(match.out.shape)}"
    if not same_shape(made.stride(), match.out.stride()):
        return "the value is not contiguous, and the replacement's would be"
    return None


def _rewrite(site: Judged) -> None:
    match, op = site.match, site.op
    assert op is not None
    graph, root = match.root.graph, match.root
    if root._erased or not root.users:
        # Part of a larger region that has taken it over.
        _erase(match)
        return
    place = match.writes[-1].next if match.writes else root
    with graph.inserting_before(place):
        given = tuple(_concrete(graph, value) for value in site.arguments.values())
        new = graph.call_function(op.overload, given, {"provider": site.provider})
    new.meta = dict(root.meta)
    # What reads the value before it is complete, as the writes themselves do, keeps reading the unfinished tensor.
    earlier = {user for user in root.users if user < new}
    root.replace_all_uses_with(new, delete_user_cb=lambda user: user not in earlier)
    _erase(match)


def _erase(match: Match) -> None:
    graph = match.root.graph
    for write in reversed(match.writes):
        if not write._erased:
            graph.erase_node(write)
    left = [node for node in match.nodes | match.inner if not node._erased and node not in match.writes]
    for node in sorted(left, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _concrete(graph: fx.Graph, value: Any) -> Any:
    """A node for an expression, made where no node holds it; a number for a number."""
    if isinstance(value, list):
        return [_concrete(graph, part) for part in value]
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
