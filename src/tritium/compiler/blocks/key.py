"""Compute the key of a segment: segments with equal keys share compiled code.

They have equal operations, constants and data flow; their inputs have equal dtypes, shapes and strides, and share memory
in the same way. A view of a buffer differs from a separate tensor: code for one would read the other wrongly. Generated code
counts from the first element of an input, so that only the alignment of its offset matters, unless a result is a view of it.

Sizes are compared by their symbols. Compiling adds guards on symbols, which are valid only for the same symbols. A key with
symbols is never looked up in another compilation, where the same name can mean another size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.blocks.segments import Facts, Segment, name_of
from tritium.graph import value_of

# The largest alignment in bytes that generated kernels rely on.
ALIGNMENT = 64

_PLAIN = (str, bool, int, complex, bytes, type(None), type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type)


@dataclass(frozen=True)
class Key:
    """The key of a segment, and whether it is valid in another compilation.

    `floats` are the symbols of floats that Dynamo turned into inputs. Equal blocks have different ones until Inductor makes
    Dynamo trace the model again with the floats as constants. They do not prevent a cut, but they prevent shared code.
    """

    value: Hashable
    floats: tuple[str, ...]
    is_portable: bool


def key_of(segment: Segment, facts: Facts) -> Key:
    """Return the key of a segment."""
    return _Writer(segment, facts).key()


class _Writer:
    def __init__(self, segment: Segment, facts: Facts) -> None:
        self.segment, self.facts = segment, facts
        self.places: dict[fx.Node, int] = {}
        self.memory: dict[int, int] = {}
        self.floats: dict[str, int] = {}
        # The memory of results and writes: their views are made again with the offset of the input.
        self.viewed = facts.memory_of(segment.outputs) | facts.written_by(segment.nodes)
        self.counts_from_start = any(name_of(node.target).startswith("as_strided") for node in segment.nodes)
        self.is_portable = True

    def key(self) -> Key:
        parts: list[Hashable] = []
        for node in self.segment.inputs:
            self.places[node] = len(self.places)
            parts.append(self._input(node))
        for node in self.segment.nodes:
            parts.append(self._call(node))
            self.places[node] = len(self.places)
        parts.append(tuple(self.places[node] for node in self.segment.outputs))
        return Key(tuple(parts), tuple(self.floats), self.is_portable and not self.floats)

    def _float(self, node: fx.Node) -> Hashable:
        return "float", tuple(self.floats.setdefault(name, len(self.floats)) for name in self.facts.symbols[node])

    def _input(self, node: fx.Node) -> Hashable:
        value = value_of(node)
        if isinstance(value, torch.SymFloat):
            return self._float(node)
        if self.facts.symbols[node]:
            self.is_portable = False
        if not isinstance(value, torch.Tensor):
            return type(value).__name__, repr(value)
        flags = value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg()
        strided = value.layout is torch.strided
        return (
            *(value.dtype, value.device, value.layout, flags, isinstance(value, torch.nn.Parameter)),
            _numbers(value.shape),
            (_numbers(value.stride()), self._offset(node, value)) if strided else None,
            self.memory.setdefault(compat.tensors.storage_id(value), len(self.memory)),
            compat.dynamo.is_static_input(node),
        )

    def _offset(self, node: fx.Node, value: torch.Tensor) -> str:
        offset = value.storage_offset()
        if (
            not isinstance(offset, int)
            or self.counts_from_start
            or not self.viewed.isdisjoint(self.facts.storages[node])
        ):
            return str(offset)
        return f"aligned to {math.gcd(offset * value.element_size(), ALIGNMENT)}"

    def _call(self, node: fx.Node) -> Hashable:
        if node.op in ("get_attr", "call_module"):
            # The attribute's content is part of the code, and another module can have another attribute of this name.
            self.is_portable = False
            target: Hashable = ("attribute", id(operator.attrgetter(str(node.target))(self.facts.gm)))
        else:
            target = node.target
        arguments = self._argument(node.args), self._argument(node.kwargs)
        value = value_of(node)
        if isinstance(value, torch.SymFloat):
            self._float(node)
        elif self.facts.symbols[node]:
            # Sizes of intermediate values can have symbols that the inputs' sizes lack.
            self.is_portable = False
        return node.op, target, arguments

    def _argument(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", self.places[value]
        if isinstance(value, (tuple, list)):
            # As an index, a list and a tuple have different meanings.
            return type(value).__name__, tuple(map(self._argument, value))
        if isinstance(value, dict):
            return "mapping", tuple((name, self._argument(item)) for name, item in value.items())
        if isinstance(value, slice):
            return "slice", *map(self._argument, (value.start, value.stop, value.step))
        if isinstance(value, float):
            # 0.0 == -0.0, but division by them differs.
            return "float", value.hex()
        if isinstance(value, (*_PLAIN, *_NAMED)):
            return type(value).__name__, value
        self.is_portable = False
        return "object", id(value)


def _numbers(sizes: Any) -> tuple[str, ...]:
    return tuple(map(str, sizes))
