"""Patterns: the forms of values that a fusion looks for, and what it captures from them.

A pattern matches canonical expressions (see `expression`), so it says nothing about spellings. An RMSNorm is

    x, eps = tensor("x"), number("eps")
    normed = form("mul", x, form("rsqrt", form("add", form("mean", form("square", x)), eps)))
    one_of(form("mul", normed, tensor("weight")), given(normed, weight=None))

| pattern | matches |
|---|---|
| `form(name, *operands)` | a value of that form, through casts and identities; `add` and `mul` in either order |
| `tensor(name)` | any tensor, without the casts that lose nothing, and captures it |
| `number(name)` | a number, or a value of the graph that is one, and captures it |
| `value(name)` | any operand or attribute as it is, also None, and captures it |
| `rest(name)` | all remaining operands, and captures them as a list |
| `captured(name, pattern)` | what the pattern matches, and captures the value too |
| `one_of(*patterns)` | what one of them matches; the first that leads to a match wins |
| `optional(outer, inner, **absent)` | `outer`, which contains `inner`; or `inner` alone, with other captures instead |
| `given(pattern, **captures)` | what the pattern matches, with additional captures |
| `only_reader(pattern)` | an operand that nothing else in the graph reads |
| `shared(pattern)` | what the pattern matches; other sites may contain the same nodes |
| `site(fusion, **parts)` | the value of a site of another fusion, with its captures; `parts` are matched with some of them |

A name that is captured twice stands for one value. An operand that is no pattern is a constant.
`traced` makes a pattern of a plain function of tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol

from torch import fx

from tritium.fusions.canonical import Canonicaliser
from tritium.fusions.expression import (
    Expr,
    dtype_of,
    is_number,
    is_scalar,
    nodes_between,
    shape_of,
    strip_casts,
    strip_in_place,
    strip_same,
    strip_widening,
)
from tritium.graph import same_shape

COMMUTATIVE = frozenset({"add", "mul"})


class Sites(Protocol):
    """The sites that were found before."""

    def site_at(self, expr: Any, fusion: str, *, casts: bool) -> Found | None: ...


@dataclass(frozen=True)
class Found:
    """A partial match: the captures, the nodes that belong to it alone, and those that other sites may share."""

    sites: Sites
    bindings: Mapping[str, Any] = field(default_factory=dict)
    nodes: frozenset[fx.Node] = frozenset()
    shared: frozenset[fx.Node] = frozenset()

    def covering(self, outer: Any, inner: Any) -> Found:
        """Return this with the casts and identities from `outer` to `inner`."""
        return replace(self, nodes=self.nodes | nodes_between(outer, inner)) if outer is not inner else self

    def binding(self, name: str, captured: Any) -> Iterator[Found]:
        """Yield this with a capture; nothing if the name stands for another value."""
        if name not in self.bindings:
            yield replace(self, bindings={**self.bindings, name: captured})
        elif same_value(self.bindings[name], captured):
            yield self


# Yields the ways to match a value after what was found before.
Matcher = Callable[[Any, Found], Iterator[Found]]
Ends = frozenset[str]
P = ParamSpec("P")

# The form of a pattern that can end anywhere, and of one for all remaining operands.
ANY: Ends = frozenset({"any"})
REST: Ends = frozenset({"rest"})


@dataclass(frozen=True, repr=False)
class Pattern:
    """A pattern: how it matches a value, the forms at which a match can end, and its source."""

    match: Matcher
    forms: Ends
    text: str

    def __repr__(self) -> str:
        return self.text


def kind(make: Callable[P, tuple[Matcher, Ends]]) -> Callable[P, Pattern]:
    """Declare a kind of pattern by a function that returns how it matches and at which forms."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Pattern:
        shown = [*map(repr, args), *(f"{name}={thing!r}" for name, thing in kwargs.items())]
        return Pattern(*make(*args, **kwargs), f"{make.__name__}({', '.join(shown)})")

    return made


# Views of one value are equal if they are views of the same kind: two `freqs[..., 0]` of one tensor are one table.
VIEWS = frozenset({"index", "piece", "view", "reshape", "permute"})


def same_value(left: Any, right: Any) -> bool:
    """Return True if two expressions are one value, or the same view of one, except for casts that lose nothing."""
    left, right = strip_widening(left), strip_widening(right)
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return not isinstance(left, Expr) and not isinstance(right, Expr) and left == right
    if left is right or (left.node is not None and left.node is right.node):
        return True
    if left.op != right.op or left.op not in VIEWS or left.attrs != right.attrs:
        return False
    if dtype_of(left) != dtype_of(right) or not same_shape(shape_of(left), shape_of(right)):
        return False
    return all(map(same_value, left.args, right.args))


def _matches(part: Any, target: Any, found: Found) -> Iterator[Found]:
    if isinstance(part, Pattern):
        yield from part.match(target, found)
    elif not isinstance(target, Expr) and target == part and is_number(target) == is_number(part):
        yield found


def all_match(parts: Sequence[Any], targets: Sequence[Any], found: Found) -> Iterator[Found]:
    """Yield the ways to match values with patterns or constants, one each."""
    if not parts:
        yield found
        return
    for first in _matches(parts[0], targets[0], found):
        yield from all_match(parts[1:], targets[1:], first)


@kind
def form(name: str, *operands: Any, attrs: Sequence[Any] | None = None, casts: bool = True) -> tuple[Matcher, Ends]:
    """Match a value of a canonical form; without `casts`, only identities may stand in front of it."""
    has_rest = bool(operands) and isinstance(operands[-1], Pattern) and operands[-1].forms == REST

    def match(target: Any, found: Found) -> Iterator[Found]:
        inner = strip_casts(target) if casts else strip_same(target)
        if not isinstance(inner, Expr) or inner.op != name:
            return
        args = inner.args
        if has_rest:
            fixed = len(operands) - 1
            args = (*args[:fixed], list(args[fixed:]))
        if len(args) != len(operands) or (attrs is not None and len(attrs) != len(inner.attrs)):
            return
        own = found.covering(target, inner)
        if inner.node is not None:
            own = replace(own, nodes=own.nodes | {inner.node})
        parts = (*operands, *(attrs or ()))
        for order in (args, args[::-1]) if name in COMMUTATIVE else (args,):
            yield from all_match(parts, (*order, *inner.attrs[: len(attrs or ())]), own)

    return match, frozenset({name})


@kind
def tensor(name: str) -> tuple[Matcher, Ends]:
    """Match and capture any tensor, without casts that lose nothing and identities that keep its strides."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        inner = strip_in_place(target)
        if isinstance(inner, Expr) and shape_of(inner) is not None:
            yield from found.covering(target, inner).binding(name, inner)

    return match, ANY


@kind
def number(name: str) -> tuple[Matcher, Ends]:
    """Match and capture a number, or a value of the graph that is one."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        inner = strip_same(target)
        if is_scalar(inner):
            yield from found.binding(name, inner)

    return match, ANY


@kind
def value(name: str) -> tuple[Matcher, Ends]:
    """Match and capture any operand or attribute as it is."""
    return lambda target, found: found.binding(name, target), ANY


@kind
def rest(name: str) -> tuple[Matcher, Ends]:
    """Match and capture all remaining operands of a form as a list."""
    return value(name).match, REST


@kind
def captured(name: str, pattern: Pattern) -> tuple[Matcher, Ends]:
    """Match a pattern, and capture the whole value without the casts that lose nothing."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        for inner in pattern.match(target, found):
            yield from inner.binding(name, strip_widening(target))

    return match, pattern.forms


@kind
def one_of(*patterns: Pattern) -> tuple[Matcher, Ends]:
    """Match any of some patterns, tried in this order."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        for pattern in patterns:
            yield from pattern.match(target, found)

    return match, frozenset[str]().union(*(pattern.forms for pattern in patterns))


@kind
def given(pattern: Pattern, **captures: Any) -> tuple[Matcher, Ends]:
    """Match a pattern, and add constant captures."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        for inner in pattern.match(target, found):
            yield replace(inner, bindings={**inner.bindings, **captures})

    return match, pattern.forms


def optional(outer: Pattern, inner: Pattern, **absent: Any) -> Pattern:
    """Match `outer`, which contains `inner`; or `inner` alone, with the captures that `outer` would have added."""
    return one_of(outer, given(inner, **absent))


@kind
def only_reader(pattern: Pattern) -> tuple[Matcher, Ends]:
    """Match an operand that is read by one node alone, through casts and identities."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        inner = strip_casts(target)
        nodes = nodes_between(target, inner)
        if isinstance(inner, Expr) and inner.node is not None and all(len(n.users) == 1 for n in (*nodes, inner.node)):
            yield from pattern.match(target, found)

    return match, pattern.forms


@kind
def shared(pattern: Pattern) -> tuple[Matcher, Ends]:
    """Match a pattern whose nodes other sites may contain too, as a norm that feeds two modulations."""

    def match(target: Any, found: Found) -> Iterator[Found]:
        for inner in pattern.match(target, replace(found, nodes=frozenset())):
            yield replace(inner, nodes=found.nodes, shared=inner.shared | inner.nodes)

    return match, pattern.forms


@kind
def site(fusion: str, *, casts: bool = True, **parts: Pattern) -> tuple[Matcher, Ends]:
    """Match the value of another fusion's site, with its captures; match `parts` with those of the same name.

    Without `casts`, only casts that lose nothing may stand in front of it.
    """

    def match(target: Any, found: Found) -> Iterator[Found]:
        inside = found.sites.site_at(target, fusion, casts=casts)
        if inside is None:
            return
        others = {name: thing for name, thing in inside.bindings.items() if name not in parts}
        covered = found.shared | inside.nodes | inside.shared
        whole = replace(found, bindings={**found.bindings, **others}, shared=covered)
        yield from all_match(list(parts.values()), [inside.bindings[name] for name in parts], whole)

    return match, ANY


@functools.cache
def traced(spelling: Callable[..., Any]) -> Pattern:
    """Return the pattern of a plain function; a parameter annotated `float` is a number, the others are tensors."""
    graph = fx.symbolic_trace(spelling).graph
    parameters = inspect.signature(spelling, eval_str=True).parameters
    canon = Canonicaliser()

    def pattern(thing: Any) -> Any:
        if not isinstance(thing, Expr):
            return thing
        inner = strip_casts(thing)
        if inner.node is not None and inner.node.op == "placeholder":
            name = str(inner.node.target)
            return number(name) if parameters[name].annotation is float else tensor(name)
        return form(inner.op, *map(pattern, inner.args), attrs=inner.attrs)

    output = next(node for node in graph.nodes if node.op == "output")
    made: Pattern = pattern(canon.of(output.args[0]))
    return made
