"""Fuse GroupNorm and the SiLU after it, the pair in front of every convolution of a UNet or VAE.

Before:  group_norm(x) -> silu
After:   tritium::group_norm_silu(x, groups, weight, bias, eps)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import fx

from tritium.fusions.fusion import Fusion
from tritium.fusions.patterns import form, value
from tritium.graph import argument
from tritium.ops import group_norm_silu

NORM = form("group_norm", value("x"), value("weight"), value("bias"), attrs=(value("groups"), value("eps")))
CONVOLUTIONS = frozenset({F.conv2d, F.conv3d, torch.conv2d, torch.conv3d})
CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def feeds_convolutions(node: fx.Node) -> bool:
    """Return True if only convolutions read a value, directly or after a conversion to channels-last."""
    return bool(node.users) and all(
        user.target in CONVOLUTIONS
        or (user.target == "contiguous" and user.kwargs.get("memory_format") in CHANNELS_LAST)
        or (user.target is F.dropout and not argument(user, 2, "training", True) and feeds_convolutions(user))
        for user in node.users
    )


FUSION = Fusion(
    name="group_norm_silu",
    families=("group_norm_silu",),
    spellings=(form("silu", NORM),),
    replacement=group_norm_silu.OP,
    # ATen's GroupNorm on a GPU loses channels-last; the op keeps it, and convolutions prefer it.
    # Fidelity 'exact' still compares strides.
    any_layout=lambda match: feeds_convolutions(match.root),
    doc=__doc__,
)
