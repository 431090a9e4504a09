"""Define a fusion: the ways models spell a region, and the op that replaces it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.errors import TritiumError
from tritium.fusions.expression import Expr, dtype_of, shape_of
from tritium.fusions.patterns import Pattern
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
    """One place where a fusion applies: what its patterns, or its `find`, fill in.

    `nodes` belong to this site alone. `inner` nodes are covered too but may be shared, as a norm that feeds two
    modulations. `writes` are in-place writes that fill an empty tensor: `root` is that tensor, and the value is its
    content after the last write.
    """

    root: fx.Node
    bindings: dict[str, Any]
    nodes: set[fx.Node] = field(default_factory=set)
    inner: set[fx.Node] = field(default_factory=set)
    writes: tuple[fx.Node, ...] = ()
    # The results of an op with several, in its order, the root among them; None for one that nothing reads. Empty: only the
    # root.
    outputs: tuple[fx.Node | None, ...] = ()
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
        return tuple(value for value in self.outputs if value is not None) or (self.root,)

    def read(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of the op that replace values, in the order of these."""
        if not self.outputs:
            return results
        return tuple(result for result, value in zip(results, self.outputs, strict=True) if value is not None)

    @property
    def inputs(self) -> list[fx.Node]:
        """Return the nodes outside that the captured values are held by."""
        return [node for node in _held(self.bindings.values()) if node not in self.nodes and node not in self.inner]

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


def _always(match: Match) -> bool:
    del match
    return True


def _never(match: Match) -> bool:
    del match
    return False


def _nothing(match: Match) -> str | None:
    del match
    return None


@dataclass(frozen=True)
class Fusion:
    """A rewrite, declared as `FUSION` in a separate file or listed in the entry points `tritium.fusions`.

    A spelling is a pattern, or a plain function of tensors in which a parameter annotated `float` matches any number.
    It matches canonical forms, so one spelling covers every operand order, cast and method-or-function variant.
    `accept` returns False for a place that looks like the spelling but computes something else; `decline` returns a
    reason to leave a correct match unchanged. Without a `replacement`, sites are only counted.
    """

    name: str
    families: tuple[str, ...]
    spellings: tuple[Pattern | Callable[..., Any], ...] = ()
    replacement: Op | None = None
    # For matches that no pattern can express: return the match that ends at a node, or None. Called for live nodes.
    find: Callable[[Any, fx.Node], Match | None] | None = None
    # Fusions that match later, as parts of a form that this one matches as a whole.
    before: tuple[str, ...] = ()
    # A region consists of sites that other fusions match, and may overlap them; its rewrite replaces them.
    region: bool = False
    # The op rounds its result once: a match extends over casts after it that only round.
    rounds: bool = True
    # Names of captures that are further results of the op, before the last one. A match may end at a node with several
    # results: these are all results of the op. A capture may be None, and those in `read_outputs` are results only if
    # something outside of the match reads them.
    outputs: tuple[str, ...] = ()
    read_outputs: tuple[str, ...] = ()
    accept: Callable[[Match], bool] = _always
    decline: Callable[[Match], str | None] = _nothing
    # Why to decline if other nodes read a value inside that is as large as the result: it would be computed twice.
    used_elsewhere: str = ""
    # True if all readers of the result accept any memory format: the op may then return another one.
    any_layout: Callable[[Match], bool] = _never
    # The op's arguments by name, expressions and numbers. None: the captures of these names.
    arguments: Callable[[Match], Mapping[str, Any]] | None = None
    # A description for the generated documentation.
    doc: str = ""

    def files(self) -> set[Path]:
        """Return the files of its functions: part of every cache key."""
        functions = (*self.spellings, self.find, self.accept, self.decline, self.any_layout, self.arguments)
        codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
        return {file for code in codes if (file := Path(code.co_filename)).exists()}

    def arguments_of(self, match: Match) -> dict[str, Any]:
        """Return the arguments of the op by name, in its order."""
        assert self.replacement is not None
        known = {**match.bindings, "out_dtype": match.out.dtype} if self.arguments is None else self.arguments(match)
        return {
            name: known[name]
            for name, default in self.replacement.parameters.items()
            if name in known or default is inspect.Parameter.empty
        }


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
