"""Keep compiled pieces, which another size or batch of the same model can reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from tritium.compiler.blocks.stitch import Boxed
from tritium.report.observation import Observation

# Beyond this number the least recently used piece is evicted. A model has about six pieces per size.
MOST = 256


@dataclass(frozen=True)
class Compiled:
    """Code for a piece, and the observation of its generation."""

    run: Boxed
    observation: Observation | None = None
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
    """Drop all code, like `torch._dynamo.reset()`."""
    _pieces.clear()
