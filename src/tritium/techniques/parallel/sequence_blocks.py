"""Forwards of blocks: streams are split before the first block, followed in each, and joined after the last.

While Dynamo traces, they put marks into the graph. In eager calls, they split and join, and a mode follows the
streams through the operators of a block and exchanges in attention.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tritium.errors import PipelineError
from tritium.models.family import REST, Cut
from tritium.techniques.parallel import streams_attention
from tritium.techniques.parallel.exchange import Grid, Segment, Segments, join, split
from tritium.techniques.parallel.exchange_attention import Chooser
from tritium.techniques.parallel.sequence_marks import CLOSE, JOIN, LOCAL, OPEN, SPLIT, WHOLE, mark
from tritium.techniques.parallel.streams import Operation, Tag, Tokens, agree
from tritium.techniques.parallel.streams_rules import assigned, name_of, tags_of

# The attribute of a module with its place; Dynamo guards attributes, but not hooks.
PLACE = "tritium_place"

# The attribute of a tensor with its tag, in eager calls.
_TAG = "_tritium_tag"

Cuts = Cut | tuple[Cut | None, ...]


class Following(TorchFunctionMode):
    """Tag the results of operators, and exchange in attention over split streams."""

    def __init__(self, grid: Grid, choose: Chooser) -> None:
        super().__init__()
        self._grid, self._choose = grid, choose
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing in a module without rules."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name = name_of(func)
        if name in streams_attention.NAMES:
            operation = self._operation(name, args, kwargs, None)
            if streams_attention.is_split(operation):
                return self._attention(func, operation)
        result = func(*args, **kwargs)
        if name == "setitem":
            set_tag(args[0], assigned(self._operation(name, args, kwargs, None)))
        elif isinstance(result, torch.Tensor):
            set_tag(result, tags_of(self._operation(name, args, kwargs, result)))
        elif isinstance(result, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in result):
            tags = tags_of(self._operation(name, args, kwargs, result))
            for place, part in enumerate(result):
                set_tag(part, tags[place] if isinstance(tags, list) else tags)
        return result

    def _operation(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Operation:
        return Operation(name, args, kwargs, result, tag_of, self._grid)

    def _attention(self, func: Any, operation: Operation) -> torch.Tensor:
        attention = streams_attention.attention_of(func, operation)
        result = streams_attention.exchanged(operation, attention, self._grid, self._choose(attention.q))
        set_tag(result, streams_attention.tag_of_result(operation, attention))
        return result


def tag_of(value: Any) -> Tag:
    return getattr(value, _TAG, None)


def set_tag(value: Any, tag: Tag) -> None:
    if isinstance(value, torch.Tensor) and (tag is not None or hasattr(value, _TAG)):
        setattr(value, _TAG, tag)


class Streams:
    """The lengths of the streams in the current call, and how they are split."""

    def __init__(self, grid: Grid, choose: Chooser) -> None:
        self.grid = grid
        self.ranks = grid.size
        self.lengths: dict[str, int] = {}
        self.following = Following(grid, choose)

    def segments(self, cut: Cut, size: int, *, is_local: bool) -> Segments:
        """Return the segments of a dim; tokens that are on every rank are the rest of its size."""
        split = [Segment(self.lengths[stream]) for stream in cut.streams if stream != REST]
        rest = size - sum(one.share(self.ranks) if is_local else one.length for one in split)
        return tuple(
            Segment(rest, False) if stream == REST else Segment(self.lengths[stream]) for stream in cut.streams
        )

    def note_lengths(self, value: Any, cut: Cuts) -> None:
        """Note the length of a stream that is still whole."""
        if isinstance(value, (tuple, list)):
            for place, item in enumerate(value):
                own = cut[place] if isinstance(cut, tuple) else cut
                if own is not None:
                    self.note_lengths(item, own)
        elif isinstance(value, torch.Tensor) and isinstance(cut, Cut) and len(cut.streams) == 1:
            # An integer: code is compiled for one length, of which pads follow.
            self.lengths = {**self.lengths, cut.streams[0]: int(value.shape[cut.dim])}

    def cut(self, value: Any, cut: Cuts | None, name: str, *, is_local: bool) -> Any:
        """Return tensors with this rank's tokens, tagged or marked."""
        if cut is None or value is None:
            return value
        if isinstance(value, (tuple, list)):
            cuts = cut if isinstance(cut, tuple) else (cut,) * len(value)
            return type(value)([self.cut(x, own, name, is_local=is_local) for x, own in zip(value, cuts, strict=True)])
        if not isinstance(value, torch.Tensor) or isinstance(cut, tuple):
            return value
        if cut.rank is not None and value.dim() != cut.rank:
            return value
        dim = cut.dim % value.dim()
        segments = self.segments(cut, value.shape[dim], is_local=is_local)
        if is_local:
            self._check(value, dim, self.grid.local(segments), name)
        elif value.shape[dim] == 1 and [segment.length for segment in segments] != [1]:
            # It is broadcast, and no stream of one token.
            return value
        else:
            self._check(value, dim, sum(segment.length for segment in segments), name)
        return self._placed(value, LOCAL if is_local else SPLIT, dim, segments)

    def masked(self, value: Any, cut: Cuts) -> Any:
        """Mark a mask over the tokens of all ranks; eager calls find it as it is."""
        if not torch.compiler.is_compiling() or not isinstance(value, torch.Tensor) or isinstance(cut, tuple):
            return value
        dim = cut.dim % value.dim()
        segments = self.segments(cut, value.shape[dim], is_local=False)
        if value.shape[dim] != sum(segment.length for segment in segments):
            return value
        return mark(value, WHOLE, dim, segments, self.ranks)

    def _check(self, value: torch.Tensor, dim: int, size: int, name: str) -> None:
        if value.shape[dim] != size:
            raise PipelineError(
                f"the tokens cannot be split: {name} has {value.shape[dim]} in dim {dim} where its streams have {size}"
            )

    def _placed(self, value: torch.Tensor, kind: str, dim: int, segments: Segments) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return mark(value, kind, dim, segments, self.ranks)
        tag = Tokens(dim, segments)
        if kind == JOIN:
            if not agree(tag_of(value), tag):
                raise PipelineError("the tokens cannot be split: a block returns other tokens than it got")
            return join(value, dim, segments, self.grid)
        local = split(value, dim, segments, self.grid).contiguous() if kind == SPLIT else value.view_as(value)
        set_tag(local, tag)
        return local

    def returned(self, value: Any, cut: Cut | None, *, is_last: bool) -> Any:
        """Check a block's result; after the last block, return it whole."""
        if cut is None or not isinstance(value, torch.Tensor):
            return value
        dim = cut.dim % value.dim()
        segments = self.segments(cut, value.shape[dim], is_local=True)
        if is_last:
            return self._placed(value, JOIN, dim, segments)
        if torch.compiler.is_compiling():
            return mark(value, LOCAL, dim, segments, self.ranks)
        if not agree(tag_of(value), Tokens(dim, segments)):
            raise PipelineError("the tokens cannot be split: a block returns other tokens than it got")
        return value


STREAM, TABLE, MASK = "stream", "table", "mask"

# An argument: its name, its position, its cut, and one of these kinds.
Input = tuple[str, int, Cuts, str]


@dataclass(eq=False)
class Place:
    """What happens around the forward of one block."""

    streams: Streams
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Cut | None, ...] = ()
    is_first: bool = False
    is_last: bool = False
    # The forward that was replaced, as a function of the module.
    forward: Callable[..., Any] = nn.Module.forward


def _block(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward over a rank's tokens."""
    place: Place = self.tritium_place
    args, kwargs = _split(place, args, kwargs)
    if torch.compiler.is_compiling():
        return _joined(place, place.forward(self, *args, **kwargs))
    with place.streams.following:
        output = place.forward(self, *args, **kwargs)
    return _joined(place, output)


def _denoiser(self: Any, *args: Any, **kwargs: Any) -> Any:
    place: Place = self.tritium_place
    args, kwargs = _split(place, args, kwargs)
    return place.forward(self, *args, **kwargs)


def _opaque(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module without rules, which computes each token alone: its result has the tokens of its argument."""
    place: Place = self.tritium_place
    streams = place.streams
    if torch.compiler.is_compiling():
        output = place.forward(self, mark(x, OPEN, 0, (), streams.ranks), *args, **kwargs)
        return mark(output, CLOSE, 0, (), streams.ranks)
    with streams.following.paused():
        output = place.forward(self, x, *args, **kwargs)
    set_tag(output, tag_of(x))
    return output


def _split(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split or declare the streams among a block's arguments."""
    streams, given, named = place.streams, list(args), dict(kwargs)
    if place.is_first:
        streams.lengths = {}
        for name, index, cut, kind in place.inputs:
            if kind == STREAM:
                streams.note_lengths(_argument(given, named, name, index), cut)
    for name, index, cut, kind in place.inputs:
        value = _argument(given, named, name, index)
        if value is None:
            continue
        if kind == MASK:
            value = streams.masked(value, cut)
        else:
            value = streams.cut(value, cut, name, is_local=kind == STREAM and not place.is_first)
        if name in named:
            named[name] = value
        else:
            given[index] = value
    return tuple(given), named


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], name: str, index: int) -> Any:
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else None


def _joined(place: Place, output: Any) -> Any:
    """Check the streams that a block returns, and join them after the last one."""
    if not isinstance(output, (tuple, list)):
        return place.streams.returned(output, place.outputs[0], is_last=place.is_last)
    parts = [
        place.streams.returned(part, cut, is_last=place.is_last)
        for part, cut in zip(output, place.outputs, strict=False)
    ]
    return (*parts, *output[len(parts) :])


_FORWARDS = {"block": _block, "denoiser": _denoiser, "opaque": _opaque}


@dataclass
class Installed:
    """The forwards that were replaced; `remove` restores them."""

    modules: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def put(self, module: nn.Module, place: Place, kind: str) -> None:
        """Replace a module's forward; Dynamo guards the attribute with the place, and not hooks."""
        before = module.__dict__.get("forward")
        place.forward = type(module).forward if before is None else functools.partial(_bound, before)
        self.modules.append((module, before))
        module.__dict__[PLACE] = place
        module.__dict__["forward"] = types.MethodType(_FORWARDS[kind], module)

    def remove(self) -> None:
        while self.modules:
            module, before = self.modules.pop()
            del module.__dict__[PLACE], module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


def _bound(forward: Callable[..., Any], _module: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def inputs_of(module: nn.Module, **cuts: Mapping[str, Any]) -> tuple[Input, ...]:
    """Return the arguments of a module's forward that are split, by kind."""
    names = list(inspect.signature(module.forward).parameters)
    for name in (name for named in cuts.values() for name in named):
        if name not in names:
            raise PipelineError(
                f"{type(module).__name__} has no argument {name!r}; its facts are for another diffusers"
            )
    return tuple((name, names.index(name), cut, kind) for kind, named in cuts.items() for name, cut in named.items())
