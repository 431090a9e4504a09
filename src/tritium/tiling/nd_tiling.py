"""Request N-dimensional tilings for convolution-heavy dynamic graphs before torch 2.11.

In those versions, Inductor's coalescing analysis does not support symbolic sizes, and transposing kernels fall back to
one flat grid. torch 2.11 supports them, and these settings disable its analysis for the whole graph: measured on an
H200, an AutoencoderKL decode gets 1.1 times slower (53.0 -> 59.3 ms) and a RoPE 3.2 times. So the pass declines on
newer versions, where the same switch controls the choice of each kernel's tiling (`tiling/choose.py`).
"""

from __future__ import annotations

from torch import fx

from tritium.compat.versions import Version
from tritium.graph import is_conv_heavy, is_dynamic
from tritium.passes import ConfigRequest, Decline, Pass, PassContext

FIXED_IN: Version = (2, 11)

SETTINGS = {"triton.prefer_nd_tiling": True, "triton.max_tiles": 3, "triton.tile_reductions": True}


def gate(torch_version: Version, *, dynamic: bool, conv_heavy: bool) -> str | None:
    """Return why the workaround must stay off, or None if all three conditions hold.

    >>> gate((2, 10), dynamic=True, conv_heavy=True)
    >>> gate((2, 13), dynamic=True, conv_heavy=True)
    'torch 2.13 tiles symbolic sizes itself; these settings would switch its analysis off'
    """
    if torch_version >= FIXED_IN:
        version = ".".join(map(str, torch_version))
        return f"torch {version} tiles symbolic sizes itself; these settings would switch its analysis off"
    if not dynamic:
        return "no input has a dynamic size"
    if not conv_heavy:
        return "not a convolution-heavy graph: N-dimensional tiling slows transformer kernels down"
    return None


def run(graph: fx.Graph, context: PassContext) -> ConfigRequest | Decline:
    reason = gate(context.torch_version, dynamic=is_dynamic(graph), conv_heavy=is_conv_heavy(graph))
    if reason is not None:
        return Decline(reason)
    version = ".".join(map(str, context.torch_version))
    return ConfigRequest(SETTINGS, because=f"torch {version} leaves dynamic convolution graphs untiled")


PASS = Pass("nd_tiling_workaround", run)
