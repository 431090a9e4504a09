"""Define a fusion: the ways models spell a region, and the op that replaces it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.errors import TritiumError
from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.graph import value_of
from tritium.ops import Op
from tritium.report.graph_text import source_line


@dataclass(frozen=True)
class Call:
    """An argument that no node of the graph holds: a tensor method with its arguments.

    >>> Call("transpose", ("q", 1, 2))
    Call(method='transpose', args=('q', 1, 2))
    """

    method: str
    args: tuple[Any, ...]


@dataclass
class Match:
    """One place where a fusion applies.

    `nodes` belong to this site alone. `inner` nodes are covered too but may be shared, as a norm that feeds two
    modulations. `writes` are in-place writes that fill an empty tensor: `root` is that tensor, and the value is its
    content after the last write.
    """

    root: fx.Node
    bindings: dict[str, Any]
    nodes: set[fx.Node] = field(default_factory=set)
    inner: set[fx.Node] = field(default_factory=set)
    writes: tuple[fx.Node, ...] = ()
    # Families of smaller sites inside this one: switching one of them off also leaves this one alone.
    covers: tuple[str, ...] = ()
    # The results of an op with several, in its order; the last one is the root. Empty: only the root.
    outputs: tuple[fx.Node, ...] = ()
    # True if the readers accept any memory format: the op may then return another one.
    any_layout: bool = False
    # A method with arguments to apply to the op's result; empty: the result is the value.
    shown: tuple[Any, ...] = ()

    def shape(self, name: str) -> torch.Size | None:
        return shape_of(self.bindings[name])

    def dtype(self, name: str) -> torch.dtype | None:
        return dtype_of(self.bindings[name])

    @property
    def out(self) -> Any:
        """Return the fake tensor of the replaced value."""
        return value_of(self.root)

    @property
    def values(self) -> tuple[fx.Node, ...]:
        """Return the nodes that the op's results replace."""
        return self.outputs or (self.root,)

    @property
    def inputs(self) -> list[fx.Node]:
        return list(_held(self.bindings.values()))

    @property
    def source_line(self) -> str:
        """Return the line of the model this came from, as `normalization.py:553 in forward`."""
        return source_line(self.root)


def _held(things: Iterable[Any]) -> Iterator[fx.Node]:
    """Yield the nodes that hold the inputs of some arguments."""
    for thing in things:
        if isinstance(thing, Expr) and thing.node is not None:
            yield thing.node
        elif isinstance(thing, Call):
            yield from _held(thing.args)
        elif isinstance(thing, (list, tuple)):
            yield from _held(thing)


def _anything(match: Match) -> bool:
    del match
    return True


def _nothing(match: Match) -> str | None:
    del match
    return None


@dataclass(frozen=True)
class Fusion:
    """A rewrite, declared as `FUSION` in a separate file or listed in the entry points `tritium.fusions`.

    A spelling is a plain function of tensors; it is brought into canonical form, so one spelling covers every operand
    order, cast and method-or-function variant. A parameter annotated `float` matches any number.
    `accept` returns False for a place that looks like the spelling but computes something else; `decline` returns a
    reason to leave a correct match unchanged. Without a `replacement`, sites are only counted. `arguments` maps a match
    to the op's arguments by name: expressions and numbers.
    """

    name: str
    families: tuple[str, ...]
    spellings: tuple[Callable[..., Any], ...] = ()
    replacement: Op | None = None
    # For matches that no spelling can express: return the match that ends at a node, or None. Called for live nodes.
    find: Callable[[Any, fx.Node], Match | None] | None = None
    # Fusions with higher numbers match first; among equal numbers, larger spellings first.
    priority: int = 0
    # A region consists of sites that other fusions match, and may overlap them; its rewrite replaces them.
    region: bool = False
    accept: Callable[[Match], bool] = _anything
    decline: Callable[[Match], str | None] = _nothing
    arguments: Callable[[Match], Mapping[str, Any]] | None = None
    # A description for the generated documentation.
    doc: str = ""

    def arguments_of(self, match: Match) -> dict[str, Any]:
        if self.arguments is not None:
            return dict(self.arguments(match))
        return {**match.bindings, "out_dtype": match.out.dtype}


class FusionFailed(Exception):
    """An error raised by a fusion; `error` is the original exception."""

    def __init__(self, fusion: Fusion, error: Exception) -> None:
        super().__init__(f"fusion {fusion.name!r}: {error}")
        self.fusion = fusion
        self.error = error


@contextlib.contextmanager
def blamed(fusion: Fusion) -> Iterator[None]:
    """Raise errors from inside as a `FusionFailed` of this fusion; pass errors meant for users through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TritiumError) or compat.dynamo.passes_through(error):
            raise
        raise FusionFailed(fusion, error) from error
