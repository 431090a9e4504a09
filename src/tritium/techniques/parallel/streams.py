"""Follow split streams of tokens through the operators of a model.

A tensor with tokens has a tag: the dim with its tokens, and their segments. For each operator a rule returns the tags of
its results, and raises if a token would meet others in it: then this family of models cannot be split. The same rules
apply to Dynamo's graph and to eager calls, as both consist of torch's functions and methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium.errors import PipelineError
from tritium.techniques.parallel.exchange import Grid, Segment, Segments


class Mixed(PipelineError):
    """An operator mixes split tokens with others."""


@dataclass(frozen=True)
class Tokens:
    """The tag of a tensor: which of its dims has the tokens of which segments.

    If a view merged the dim with others, `outer` is the size of those before it, and `inner` of those behind it.
    """

    dim: int
    segments: Segments
    outer: int = 1
    inner: int = 1

    @property
    def is_split(self) -> bool:
        return any(segment.is_split for segment in self.segments)

    def at(self, dim: int) -> Tokens:
        return replace(self, dim=dim)


def agree(tag: Tag, declared: Tokens) -> bool:
    """Return True if a tag is the declared one; runs of whole segments count as one."""
    if tag is None:
        return not declared.is_split
    return isinstance(tag, Tokens) and merged(tag) == merged(declared)


def merged(tag: Tokens) -> Tokens:
    """Return a tag with runs of whole segments as one."""
    segments: list[Segment] = []
    for segment in tag.segments:
        last = segments[-1] if segments else None
        is_run = last is not None and not (last.is_split or last.is_uniform or segment.is_split or segment.is_uniform)
        segments.append(Segment(segments.pop().length + segment.length, False) if is_run else segment)
    return replace(tag, segments=tuple(segments))


@dataclass(frozen=True)
class Uniform:
    """The tag of a tensor of equal values, such as ones: it fits any stream."""


Tag = Tokens | Uniform | None


@dataclass(frozen=True)
class Operation:
    """One call of an operator: arguments and result as tensors (also fake ones), and the tags of arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    tag_of: Callable[[Any], Tag]
    grid: Grid

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in _leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]

    @property
    def first(self) -> torch.Tensor:
        return self.tensors[0]

    def tokens(self, tensor: Any) -> Tokens | None:
        tag = self.tag_of(tensor)
        return tag if isinstance(tag, Tokens) else None

    def mixed(self, how: str = "mixes split tokens with others") -> Mixed:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors)
        return Mixed(f"the tokens cannot be split: {self.name} of {shapes} {how}")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
