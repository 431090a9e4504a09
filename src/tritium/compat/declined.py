"""List the parts of Tritium that decline on this version of torch, for `tritium doctor`."""

from __future__ import annotations

import importlib

from tritium.compat.late_kernels import decline_hooks
from tritium.compat.shapes import decline_sizes_apart
from tritium.compat.tiling import decline_tiling
from tritium.compat.versions import TORCH, Version, decline_name

# A part of Tritium, and the function or value of torch that it requires.
_NEEDED = (
    ("CPU convolutions without guards on their size", "torch._C", "_select_conv_backend"),
    ("CPU convolutions without guards on their size", "torch._C", "_conv_determine_backend_memory_format"),
    ("GroupNorm traced by its sizes alone", "torch._subclasses.fake_impls", "FAST_OP_IMPLEMENTATIONS"),
    ("attention of packed sequences", "torch.nn.attention.varlen", "varlen_attn"),
    ("shorter compilation without Dynamo's trace logs", "torch._dynamo.symbolic_convert", "get_funcname"),
    ("shorter compilation without guard profiles", "torch._dynamo.guards", "profile_guard_manager"),
    ("reuse of captured outputs", "torch._C", "_storage_Use_Count"),
)


def declined_parts(version: Version = TORCH) -> dict[str, str]:
    """Return the parts of Tritium that decline on this torch, each with the reason.

    >>> declined_parts((2, 16))["the tiling policy"]
    'supported on torch 2.11 to 2.15, not on 2.16'
    """
    reasons = {
        "the tiling policy": decline_tiling(version),
        "separate symbols for equal sizes": decline_sizes_apart(),
        "kernels of several pieces compiled at once": decline_hooks(),
    }
    found = {part: reason for part, reason in reasons.items() if reason is not None}
    for part, module, name in _NEEDED:
        try:
            reason = decline_name(importlib.import_module(module), name)
        except ImportError as error:
            reason = str(error)
        if reason is not None:
            found.setdefault(part, reason)
    return found
