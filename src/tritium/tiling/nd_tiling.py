"""Ask for N-dimensional tilings where Inductor cannot find them itself: convolution-heavy dynamic graphs before torch 2.11.

There, Inductor's coalescing analysis gives up on symbolic sizes and transposing kernels fall back to one flat grid.
torch 2.11 analyses symbolic sizes itself, and the same settings switch that analysis off for the whole graph: measured on
an H200, an AutoencoderKL decode gets 1.1 times slower (53.0 -> 59.3 ms) and a RoPE 3.2 times. So newer versions decline,
and there the same switch governs the choice of each kernel's tiling (`tiling/choose.py`).
"""

from __future__ import annotations

from torch import fx

from tritium.compat import Version
from tritium.passes import ConfigRequest, Decline, Pass, PassContext
from tritium.tiling.predicates import is_conv_heavy, is_dynamic

FIXED_IN: Version = (2, 11)

SETTINGS = {"triton.prefer_nd_tiling": True, "triton.max_tiles": 3, "triton.tile_reductions": True}


def gate(torch_version: Version, *, dynamic: bool, conv_heavy: bool) -> str | None:
    """Why the workaround must stay off, or None when all three conditions for it hold.

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
