"""`tritium::channels_last(x)`: a channels-last copy that Inductor does not inline.

Inductor treats `x.contiguous(memory_format=...)` as an expression and computes it again in every kernel that reads it,
so that each would read the image across its strides. This op writes a separate buffer once, with a kernel that Inductor
tiles.
"""

from __future__ import annotations

import torch

from tritium import compat
from tritium.ops.memory_format import FORMATS

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("channels_last(Tensor x) -> Tensor")


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=FORMATS[x.dim()])


_LIBRARY.impl("channels_last", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::channels_last", _copy, lib=_LIBRARY)

CHANNELS_LAST = torch.ops.tritium.channels_last.default


def make_known_to_inductor() -> None:
    """Register the op's lowering before a graph with it is lowered; ATen copies if torch lacks support."""
    compat.lowerings.lower(CHANNELS_LAST, compat.lowerings.channels_last)
