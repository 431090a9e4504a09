"""What a fusion is: the ways models spell a region, and the op that replaces it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.errors import TritiumError
from tritium.fusions.expression import Expr, dtype_of, shape_of, value_of
from tritium.ops import Op


@dataclass(frozen=True)
class Call:
    """An argument that no node of the graph holds: a method of a tensor, called with these arguments.

    >>> Call("transpose", ("q", 1, 2))
    Call(method='transpose', args=('q', 1, 2))
    """

    method: str
    args: tuple[Any, ...]


@dataclass
class Match:
    """One place where a fusion applies.

    `nodes` belong to this site alone. `inner` are covered too but may be shared, as a norm that feeds two modulations is.
    `writes` are the in-place writes that make the value, for spellings that fill an empty tensor: `root` is then that
    tensor, and the value is what it holds after the last write.
    """

    root: fx.Node
    bindings: dict[str, Any]
    nodes: set[fx.Node] = field(default_factory=set)
    inner: set[fx.Node] = field(default_factory=set)
    writes: tuple[fx.Node, ...] = ()
    # Families of smaller sites that lie inside: switching one of them off leaves this one alone too.
    covers: tuple[str, ...] = ()
    # The values that an op of several results gives, in its order; the last of them is the root. Empty: the root.
    outputs: tuple[fx.Node, ...] = ()
    # Whether whoever reads the values takes them in any layout: the op may then give them another.
    any_layout: bool = False
    # The method, and its arguments, that makes the value out of the op's result; empty: the result is the value.
    shown: tuple[Any, ...] = ()

    def shape(self, name: str) -> torch.Size | None:
        return shape_of(self.bindings[name])

    def dtype(self, name: str) -> torch.dtype | None:
        return dtype_of(self.bindings[name])

    @property
    def out(self) -> Any:
        """The fake tensor of the value that is replaced."""
        return value_of(self.root)

    @property
    def values(self) -> tuple[fx.Node, ...]:
        """The nodes that the op's results replace."""
        return self.outputs or (self.root,)

    @property
    def inputs(self) -> list[fx.Node]:
        return list(_held(self.bindings.values()))

    @property
    def source_line(self) -> str:
        """`normalization.py:553 in forward`: the line of the model this came from."""
        return source_line(self.root)


def source_line(node: fx.Node) -> str:
    """The line of the model that a node came from, as `normalization.py:553 in forward`; empty where nobody knows."""
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    if not places:
        return ""
    # The model's own line, not torch's wrapper around an operator.
    own = [place for place in places if "/torch/" not in place[0].replace("\\", "/")]
    file, line, function = (own or places)[-1]
    return f"{Path(file).name}:{line} in {function}"


def _held(things: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes that hold what some arguments are made of."""
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
    """A rewrite. Declared as `FUSION` in a file of its own, or named in the entry point group `tritium.fusions`.

    A spelling is a plain function of tensors; it is brought into canonical form, so one spelling serves every operand
    order, cast and method-or-function variant. A parameter annotated `float` stands for any number.
    `accept` tells whether a place that looks like the spelling is the thing meant; `decline` gives a reason why a place
    that is the thing must be left alone. Without a `replacement` a site is only counted. `arguments` maps a match to the op's arguments by name: expressions, numbers.
    """

    name: str
    families: tuple[str, ...]
    spellings: tuple[Callable[..., Any], ...] = ()
    replacement: Op | None = None
    # For what no spelling can say: the match that ends at a node, or None. Asked for every live node, last first.
    find: Callable[[Any, fx.Node], Match | None] | None = None
    # Fusions of a higher number look first; of one number, the larger spelling does.
    priority: int = 0
    # A region is made of sites that other fusions recognise too, and may overlap them; it takes them over when rewritten.
    region: bool = False
    accept: Callable[[Match], bool] = _anything
    decline: Callable[[Match], str | None] = _nothing
    arguments: Callable[[Match], Mapping[str, Any]] | None = None
    # What the name means, for the generated documentation.
    doc: str = ""

    def arguments_of(self, match: Match) -> dict[str, Any]:
        if self.arguments is not None:
            return dict(self.arguments(match))
        return {**match.bindings, "out_dtype": match.out.dtype}


class FusionFailed(Exception):
    """A fusion raised an error, which is the cause of this one."""

    def __init__(self, fusion: Fusion, error: Exception) -> None:
        super().__init__(f"fusion {fusion.name!r}: {error}")
        self.fusion = fusion
        self.error = error


@contextlib.contextmanager
def blamed(fusion: Fusion) -> Iterator[None]:
    """Raise errors from inside as a `FusionFailed` of this fusion, and what speaks to the user as it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TritiumError) or compat.passes_through(error):
            raise
        raise FusionFailed(fusion, error) from error
