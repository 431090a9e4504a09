"""Compiled pieces that this process keeps, so that another size or batch of the same model compiles only what differs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tritium.compiler.blocks.stitch import Boxed

# The least recently used piece makes room. A model has about six for each size.
MOST = 256


@dataclass(frozen=True)
class Compiled:
    """Code for a piece, and what its generation showed."""

    run: Boxed
    observation: Mapping[str, Any] | None = None
    source: Literal["codegen", "store"] = "codegen"


_pieces: OrderedDict[Hashable, Compiled] = OrderedDict()


def find(key: Hashable) -> Compiled | None:
    """Return the code for a key, if there is any."""
    found = _pieces.get(key)
    if found is not None:
        _pieces.move_to_end(key)
    return found


def keep(key: Hashable, compiled: Compiled) -> None:
    """Keep code for later graphs."""
    _pieces[key] = compiled
    while len(_pieces) > MOST:
        _pieces.popitem(last=False)


def clear() -> None:
    """Let go of all code, as `torch._dynamo.reset()` does."""
    _pieces.clear()
