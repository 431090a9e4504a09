"""Leave out a range of blocks, or the attention in them, and put back what they changed when they last ran.

The end of a range returns the input of its start plus the kept change. What the model adds between the blocks of the
range, such as a ControlNet's residuals, is in that change, so it is not counted twice.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat, device
from tritium.techniques.skip.history import buffers_like
from tritium.techniques.skip.streams import Streams
from tritium.techniques.skip.table import ATTENTION, BLOCKS, RUN

Call = Callable[..., Any]


@dataclass
class Kept:
    """The kept values of one image, by branch."""

    # The change over the range by stream, in float32.
    changes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    # The results of attention layers by their place.
    attention: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    # Branches whose values belong to this image.
    valid: set[int] = field(default_factory=set)
    valid_attention: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Forget the values, and keep the buffers."""
        self.valid.clear()
        self.valid_attention.clear()

    @property
    def bytes(self) -> int:
        tensors = [tensor for change in self.changes.values() for tensor in change.values()]
        tensors += [leaf for leaves in self.attention.values() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass
class _Call:
    """The call of the part that is running now."""

    kept: Kept
    branch: int
    letter: str
    # At the start of the range: its streams by name, and what they become at its end.
    streams: dict[str, torch.Tensor] = field(default_factory=dict)
    results: dict[str, torch.Tensor] = field(default_factory=dict)


class Ranges:
    """The gates at the blocks of a denoiser and at their attention layers."""

    def __init__(self, blocks: Sequence[nn.Module], span: tuple[int, int], letters: frozenset[str]) -> None:
        self._start, self._last = span[0], span[1] - 1
        self._keeps_blocks, self._keeps_attention = BLOCKS in letters, ATTENTION in letters
        self._place = {module: place for place, module in enumerate(blocks)}
        self.layers = _attention_layers(blocks[slice(*span)]) if self._keeps_attention else []
        self._streams = Streams()
        # Which outputs of a block are None.
        self._absent: dict[int, list[bool]] = {}
        self._call: _Call | None = None
        # Why the range always runs.
        self.refused = ""
        # What the attention of one branch takes, once it is known.
        self.attention_bytes = 0

    def begin(self, kept: Kept, branch: int, letter: str) -> None:
        self._call = _Call(kept, branch, letter)
        if letter == RUN:
            kept.valid.discard(branch)
            kept.valid_attention.discard(branch)

    def end(self) -> None:
        call, self._call = self._call, None
        self._streams.end()
        if call is not None and call.letter == RUN and self._keeps_attention and not self.refused:
            call.kept.valid_attention.add(call.branch)

    def why_run(self, kept: Kept, branch: int, letter: str) -> str | None:
        """Return why the values of a range cannot be put back, or None."""
        if self.refused:
            return self.refused
        valid = kept.valid if letter == BLOCKS else kept.valid_attention
        return None if branch in valid else "nothing is kept of the range"

    # --- blocks ---

    def around_block(self, module: nn.Module) -> Callable[[Call, tuple[Any, ...], dict[str, Any]], Any] | None:
        """Return the function that runs around the calls of a repeated block, or None for other modules."""
        place = self._place.get(module)
        if place is None or not self._keeps_blocks:
            return None
        is_inside = self._start <= place <= self._last

        def around(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            current = self._call
            if current is None or self.refused or compat.dynamo.is_compiling():
                return call(*args, **kwargs)
            if current.letter == BLOCKS and is_inside:
                return self._left_out(current, place, module, _named(module, args, kwargs))
            if current.letter != RUN:
                return call(*args, **kwargs)
            return self._observed(current, place, module, call, args, kwargs)

        return around

    def _observed(
        self,
        current: _Call,
        place: int,
        module: nn.Module,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a block; keep the streams at the start of the range, and their change at its end."""
        named = _named(module, args, kwargs)
        self._streams.arrive(named)
        if place == self._start:
            # Own copies: a block may write to its input, and captured calls lend theirs.
            current.streams = {name: tensor.clone() for name, tensor in named.items()}
        output = call(*args, **kwargs)
        leaves, _ = compat.tensors.flatten(output)
        if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            self.refused = "its blocks return more than tensors"
            return output
        self._streams.leave(type(module), named, leaves, one=isinstance(output, torch.Tensor))
        self._absent[place] = [leaf is None for leaf in leaves]
        if place == self._last:
            self._keep(current, type(module), leaves)
        return output

    def _keep(self, current: _Call, kind: type, leaves: Sequence[Any]) -> None:
        """Keep the change of every stream over the range."""
        names = self._streams.names(kind)
        streams, current.streams = current.streams, {}
        if names is None:
            # The block after the range may tell where its outputs go.
            self.refused = self._streams.refused
            return
        pairs = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf is not None]
        if any(name not in streams or streams[name].shape != leaf.shape for name, leaf in pairs):
            self.refused = "the shapes of its streams differ at the start and the end of the range"
            return
        kept = current.kept
        changes = kept.changes.get(current.branch)
        if changes is None or [change.shape for change in changes.values()] != [leaf.shape for _, leaf in pairs]:
            buffers = buffers_like([leaf for _, leaf in pairs])
            changes = kept.changes[current.branch] = {
                name: buffer for (name, _), buffer in zip(pairs, buffers, strict=True) if buffer is not None
            }
        for change, (name, leaf) in zip(changes.values(), pairs, strict=True):
            change.copy_(leaf).sub_(streams[name])
        kept.valid.add(current.branch)

    def _left_out(self, current: _Call, place: int, module: nn.Module, named: Mapping[str, torch.Tensor]) -> Any:
        """Return what a block of the range passes on: its inputs, and at the end the start plus the change."""
        names = self._streams.names(type(module))
        assert names is not None
        if place == self._start:
            for name, change in current.kept.changes[current.branch].items():
                current.results[name] = (named[name] + change).to(named[name].dtype)
        source: Mapping[str, torch.Tensor] = current.results if place == self._last else named
        outputs = [None if absent else source[name] for name, absent in zip(names, self._absent[place], strict=True)]
        return outputs[0] if self._streams.returns_one(type(module)) else tuple(outputs)

    # --- attention ---

    def around_attention(self, place: int, call: Call) -> Call:
        """Return the call of an attention layer that keeps its result, or returns the kept one."""

        def attend(*args: Any, **kwargs: Any) -> Any:
            current = self._call
            if current is None or compat.dynamo.is_compiling():
                return call(*args, **kwargs)
            key = (current.branch, place)
            if current.letter == ATTENTION:
                leaves, rebuild = current.kept.attention[key]
                return rebuild([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
            output = call(*args, **kwargs)
            if current.letter == RUN and not self.refused:
                self._keep_attention(current, key, output)
            return output

        return attend

    def _keep_attention(self, current: _Call, key: tuple[int, int], output: Any) -> None:
        leaves, rebuild = compat.tensors.flatten(output)
        before = current.kept.attention.get(key)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if before is None or not _same_form(before[0], leaves):
            if key[1] == 0:
                self._check_memory(tensors)
            if self.refused:
                return
            with torch.inference_mode(mode=False):
                copies = [torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            before = current.kept.attention[key] = [copies, rebuild]
        for copy, leaf in zip(before[0], leaves, strict=True):
            if isinstance(copy, torch.Tensor):
                copy.copy_(leaf)

    def _check_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse to keep results that do not fit the device: one for every layer of a branch."""
        needed = sum(tensor.nbytes for tensor in tensors) * len(self.layers)
        self.attention_bytes = max(self.attention_bytes, needed)
        free = device.free_memory(tensors[0].device) if tensors else None
        if free is not None and needed > free:
            self.refused = (
                f"the results of {len(self.layers)} attention layers take {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free"
            )


@functools.cache
def _parameters(kind: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)[1:]


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments of a call by their names."""
    given = {**dict(zip(_parameters(type(module).forward), args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


def _same_form(before: Sequence[Any], now: Sequence[Any]) -> bool:
    def form(leaves: Sequence[Any]) -> list[Any]:
        return [(x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves]

    return form(before) == form(now)


def _attention_layers(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    return [layer for block in blocks for layer in block.modules() if callable(getattr(layer, "processor", None))]
