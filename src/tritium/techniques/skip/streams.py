"""Which argument of a block each of its outputs continues: found by watching where tensors go, not by a table."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# The argument of blocks with the stream of the image, in all of diffusers' models.
STREAM = "hidden_states"

# Calls of the model after which the way of every output must be known.
_PATIENCE = 2


@dataclass
class _Kind:
    """What was seen of a class of blocks."""

    # The argument that each output continues, None if it was not seen yet.
    names: list[str | None]
    # Arguments of the same shape, by output.
    alike: list[list[str]] = field(default_factory=list)
    one: bool = False


class Streams:
    """The streams that pass through the blocks of a model, by class of block."""

    def __init__(self) -> None:
        self._kinds: dict[type, _Kind] = {}
        # The outputs of the block that ran last.
        self._before: tuple[type, list[weakref.ref[torch.Tensor] | None]] | None = None
        self._calls = 0
        self.refused = ""

    def arrive(self, named: Mapping[str, torch.Tensor]) -> None:
        """Record which outputs of the block before are arguments of this one."""
        if self._before is None:
            return
        kind, outputs = self._before
        seen = self._kinds[kind].names
        for place, output in enumerate(outputs):
            tensor = output() if output is not None else None
            if tensor is not None and seen[place] is None:
                seen[place] = next((name for name, value in named.items() if value is tensor), None)

    def leave(self, kind: type, named: Mapping[str, torch.Tensor], leaves: Sequence[Any], *, one: bool) -> None:
        """Record the outputs of a block, and the arguments that look like them."""
        known = self._kinds.setdefault(kind, _Kind([None] * len(leaves)))
        known.one = one
        # The last block of some models returns None for the stream of the text.
        known.alike = [
            known.alike[place] if leaf is None and known.alike else _alike(named, leaf)
            for place, leaf in enumerate(leaves)
        ]
        # A model that passes a block's result on by way of other operations leaves no trace of it.
        self._before = (kind, [None if leaf is None else weakref.ref(leaf) for leaf in leaves])

    def end(self) -> None:
        """Record that the call of the model is over."""
        if self._before is not None:
            self._before = None
            self._calls += 1

    def names(self, kind: type) -> list[str] | None:
        """Return the argument that each output of a class of blocks continues, or None if it is not clear yet."""
        known = self._kinds.get(kind)
        if known is None:
            return None
        names = list(known.names)
        while None in names:
            # An output that was not seen to arrive anywhere continues the only argument of its shape that is left.
            left = {
                place: [name for name in known.alike[place] if name not in names]
                for place, name in enumerate(names)
                if name is None
            }
            place = next((place for place, rest in left.items() if len(rest) == 1), None)
            if place is None and len(names) == 1 and STREAM in left[0]:
                place, left[0] = 0, [STREAM]
            if place is None:
                self._unclear()
                return None
            names[place] = left[place][0]
        return [name for name in names if name is not None]

    def _unclear(self) -> None:
        if self._calls >= _PATIENCE:
            self.refused = "it is not clear which outputs of its blocks continue which inputs"

    def returns_one(self, kind: type) -> bool:
        """Return True if a class of blocks returns a tensor and no tuple."""
        return self._kinds[kind].one


def _alike(named: Mapping[str, torch.Tensor], leaf: Any) -> list[str]:
    if leaf is None:
        return []
    return [name for name, value in named.items() if value.shape == leaf.shape and value.dtype == leaf.dtype]
