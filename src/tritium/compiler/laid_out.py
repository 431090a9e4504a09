"""`tritium::channels_last(x)`: a copy with the channels innermost, which stays a copy.

To Inductor `x.contiguous(memory_format=...)` is one more expression, computed anew by everyone who reads it: every kernel
of a region would read the picture across its layout. This is memory of its own, written once by a kernel that Inductor
tiles.
"""

from __future__ import annotations

import torch

from tritium import compat

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("channels_last(Tensor x) -> Tensor")


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=FORMATS[x.dim()])


_LIBRARY.impl("channels_last", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("tritium::channels_last", _copied, lib=_LIBRARY)

CHANNELS_LAST = torch.ops.tritium.channels_last.default


def make_known_to_inductor() -> None:
    """Before a graph with it is lowered; where a torch cannot be told, the copy is ATen's."""
    compat.lower_to_channels_last(CHANNELS_LAST)
