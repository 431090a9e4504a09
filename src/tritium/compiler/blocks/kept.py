"""Keep compiled pieces, which another size or batch of the same model can reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from tritium.compiler.lower import Lowered

# Beyond this number the least recently used piece is evicted. A model has about six pieces per size.
MOST = 256

_pieces: OrderedDict[Hashable, Lowered] = OrderedDict()


def find(key: Hashable) -> Lowered | None:
    """Return the code for a key, if there is any."""
    lowered = _pieces.get(key)
    if lowered is not None:
        _pieces.move_to_end(key)
    return lowered


def keep(key: Hashable, lowered: Lowered) -> None:
    """Keep code for later graphs."""
    _pieces[key] = lowered
    while len(_pieces) > MOST:
        _pieces.popitem(last=False)


def clear() -> None:
    """Drop all code, like `torch._dynamo.reset()`."""
    _pieces.clear()
